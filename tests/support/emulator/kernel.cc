// A kernel, as the emulator runs it: -DSOURCE=… -DENTRY=….
#include "emulator.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#include TEXT(SOURCE)

template <class P>
std::function<void()> body(void (*entry)(P), const void* parameters) {
    return [=] { entry(*static_cast<const P*>(parameters)); };
}

// Runs the kernel with its parameter struct at `parameters`.
extern "C" void emulate(int grid, int cluster, int resident, int block, uint64_t seed, const void* parameters) {
    emulator::run(body(ENTRY, parameters), grid, cluster, resident, block, seed);
}

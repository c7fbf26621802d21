// What the emulator includes of the standard library. Compiled once for all kernels (kernel_emulator.py).
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

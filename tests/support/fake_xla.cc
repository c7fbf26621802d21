// Calls an FFI handler as XLA does, for tests of the launcher's handlers on a machine with no GPU.
//
// Only the part of XLA's API that the launcher uses, and that all supported versions of jaxlib declare.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
    std::string message;
};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{std::to_string(args->errc) + ": " + args->message};
}

// XLA's own context, opaque to handlers: what they ask XLA for.
struct Context {
    std::uint64_t stream;
    void** state;  // of the call site
};

Context& ContextOf(XLA_FFI_ExecutionContext* context) { return *reinterpret_cast<Context*>(context); }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
    args->stream = reinterpret_cast<void*>(ContextOf(args->ctx).stream);
    return nullptr;
}

XLA_FFI_Error* SetState(XLA_FFI_State_Set_Args* args) {
    *ContextOf(args->ctx).state = args->state;
    return nullptr;
}

XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* args) {
    args->state = *ContextOf(args->ctx).state;
    return nullptr;
}

template <typename T>
T MakeStruct(std::size_t size) {
    T value = {};
    value.struct_size = size;
    return value;
}

// One-dimensional buffers of bytes.
struct Buffers {
    std::vector<std::int64_t> sizes;
    std::vector<XLA_FFI_Buffer> buffers;
    std::vector<void*> pointers;

    Buffers(const std::uint64_t* addresses, const std::int64_t* bytes, int count) : sizes(bytes, bytes + count) {
        for (int i = 0; i < count; ++i) {
            auto buffer = MakeStruct<XLA_FFI_Buffer>(XLA_FFI_Buffer_STRUCT_SIZE);
            buffer.dtype = XLA_FFI_DataType_U8;
            buffer.data = reinterpret_cast<void*>(addresses[i]);
            buffer.rank = 1;
            buffer.dims = &sizes[i];
            buffers.push_back(buffer);
        }
        for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    }
};

}  // namespace

// Calls `handler` in `stage` on buffers of which the first `operands` are operands and the others
// results. `state` is the call site's: set by the first stage, taken by the others. Returns the handler's
// error, as "code: message", or an empty text; valid until the thread's next call.
extern "C" const char* call_handler(void* handler, int stage, std::uint64_t stream, const char* plan, void** state,
                                    int operands, int results, const std::uint64_t* addresses,
                                    const std::int64_t* bytes) {
    auto api = MakeStruct<XLA_FFI_Api>(XLA_FFI_Api_STRUCT_SIZE);
    api.XLA_FFI_Error_Create = &CreateError;
    api.XLA_FFI_Stream_Get = &GetStream;
    api.XLA_FFI_State_Set = &SetState;
    api.XLA_FFI_State_Get = &GetState;

    Buffers operand_buffers(addresses, bytes, operands);
    Buffers result_buffers(addresses + operands, bytes + operands, results);
    std::vector<XLA_FFI_ArgType> operand_types(operands, XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results, XLA_FFI_RetType_BUFFER);
    XLA_FFI_ByteSpan name{"plan", 4};
    XLA_FFI_ByteSpan text{plan, std::strlen(plan)};
    XLA_FFI_ByteSpan* names[] = {&name};
    void* values[] = {&text};
    XLA_FFI_AttrType attribute_types[] = {XLA_FFI_AttrType_STRING};

    Context context{stream, state};
    auto frame = MakeStruct<XLA_FFI_CallFrame>(XLA_FFI_CallFrame_STRUCT_SIZE);
    frame.api = &api;
    frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
    frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
    frame.args = MakeStruct<XLA_FFI_Args>(XLA_FFI_Args_STRUCT_SIZE);
    frame.args.size = operands;
    frame.args.types = operand_types.data();
    frame.args.args = operand_buffers.pointers.data();
    frame.rets = MakeStruct<XLA_FFI_Rets>(XLA_FFI_Rets_STRUCT_SIZE);
    frame.rets.size = results;
    frame.rets.types = result_types.data();
    frame.rets.rets = result_buffers.pointers.data();
    frame.attrs = MakeStruct<XLA_FFI_Attrs>(XLA_FFI_Attrs_STRUCT_SIZE);
    frame.attrs.size = 1;
    frame.attrs.types = attribute_types;
    frame.attrs.names = names;
    frame.attrs.attrs = values;

    thread_local std::string message;
    message.clear();
    if (XLA_FFI_Error* error = reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame)) {
        message = error->message;
        delete error;
    }
    return message.c_str();
}

// Gives the type of a call site's state a number, as XLA does when it is registered.
extern "C" void register_type(void* type_id) { static_cast<XLA_FFI_TypeId*>(type_id)->type_id = 1; }

// Ends a call site's state, as XLA does with its executable.
extern "C" void delete_state(void* type_info, void* state) {
    static_cast<const XLA_FFI_TypeInfo*>(type_info)->deleter(state);
}

// The traits that `handler` announces to XLA.
extern "C" unsigned handler_traits(void* handler) {
    auto api = MakeStruct<XLA_FFI_Api>(XLA_FFI_Api_STRUCT_SIZE);
    auto metadata = MakeStruct<XLA_FFI_Metadata>(XLA_FFI_Metadata_STRUCT_SIZE);
    XLA_FFI_Metadata_Extension extension = {};
    extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
    extension.extension_base.type = XLA_FFI_Extension_Metadata;
    extension.metadata = &metadata;
    auto frame = MakeStruct<XLA_FFI_CallFrame>(XLA_FFI_CallFrame_STRUCT_SIZE);
    frame.api = &api;
    frame.extension_start = &extension.extension_base;
    reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame);
    return metadata.traits;
}

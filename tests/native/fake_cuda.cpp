// A CUDA driver without a card: it notes every call, keeps contexts by thread as the driver does, and has memory of the
// host for the device's. Where it is given libraries with the kernels' emulated entries a launch runs them. Handles are as
// wide as addresses and use their upper half: a caller that passes 32 bits is found out.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Handle = uint64_t;
constexpr Handle kContexts = 0x7c00000000000000ull;

std::mutex mutex;
std::string noted;
bool muted = false;
std::map<std::string, int> failing;
std::map<Handle, std::pair<std::string, Handle>> functions;  // the name, and the context
std::map<Handle, Handle> modules;                             // the context
std::vector<void*> libraries;
Handle next_handle = 0x5500000000000000ull;
int devices = 2;
thread_local std::vector<Handle> contexts;
thread_local int capture_mode = 0;

std::string text_of(Handle value) {
    char text[32];
    snprintf(text, sizeof(text), "%llx", static_cast<unsigned long long>(value));
    return text;
}

int note(const char* name, const std::string& more = "") {
    const std::lock_guard<std::mutex> lock(mutex);
    noted += std::string(name) + (more.empty() ? "" : " " + more) + "\n";
    const auto found = failing.find(name);
    return found == failing.end() ? 0 : found->second;
}

Handle current() { return contexts.empty() ? 0 : contexts.back(); }
Handle context_of(int device) { return kContexts + Handle(device) * 0x1000; }

}  // namespace

extern "C" {

// -- for tests ------------------------------------------------------------------------------------------------------------

int64_t fake_noted(char* to, int64_t room) {  // what was called since the last time
    const std::lock_guard<std::mutex> lock(mutex);
    const int64_t size = int64_t(noted.size());
    if (to != nullptr && room > size) {
        memcpy(to, noted.c_str(), size_t(size) + 1);
        noted.clear();
    }
    return size;
}
void fake_fail(const char* name, int code) {  // 0: no more
    if (code == 0) {
        failing.erase(name);
    } else {
        failing[name] = code;
    }
}
int fake_open(const char* path) {  // null: run nothing any more
    if (path == nullptr) {
        libraries.clear();
        return 1;
    }
    libraries.push_back(dlopen(path, RTLD_NOW));
    return libraries.back() != nullptr;
}
void fake_mute(int yes) { muted = yes != 0; }  // note no launches: that takes longer than all else of one
void fake_context(int device) {  // of this thread from now on; -1 for none
    contexts.clear();
    if (device >= 0) contexts.push_back(context_of(device));
}

// -- the driver -----------------------------------------------------------------------------------------------------------

int cuInit(unsigned flags) { return note("cuInit", std::to_string(flags)); }
int cuDriverGetVersion(int* version) {
    *version = 12040;
    return note("cuDriverGetVersion");
}
int cuGetErrorName(int code, const char** name) {
    *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuGetErrorString(int code, const char** text) {
    *text = code == 209 ? "no kernel image is available for execution on the device" : "something else";
    return 0;
}
int cuDeviceGet(int* device, int index) {
    *device = index;
    const int failed = note("cuDeviceGet", std::to_string(index));
    return failed != 0 ? failed : index < devices ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(Handle* context, int device) {
    *context = context_of(device);
    return note("cuDevicePrimaryCtxRetain", std::to_string(device));
}
int cuCtxGetCurrent(Handle* context) {
    *context = current();
    return 0;
}
int cuCtxPushCurrent_v2(Handle context) {
    contexts.push_back(context);
    return note("cuCtxPushCurrent", text_of(context - kContexts));
}
int cuCtxPopCurrent_v2(Handle* context) {
    *context = current();
    contexts.pop_back();
    return note("cuCtxPopCurrent", text_of(*context - kContexts));
}
int cuModuleLoadData(Handle* module, const char* image) {
    *module = next_handle += 0x10;
    modules[*module] = current();
    return note("cuModuleLoadData", std::string(image, 5) + " mode " + std::to_string(capture_mode));
}
int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    const auto found = modules.find(module);
    if (found == modules.end()) return 400;
    *function = next_handle += 0x10;
    functions[*function] = {name, found->second};
    return note("cuModuleGetFunction", name);
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return note("cuThreadExchangeStreamCaptureMode", std::to_string(capture_mode));
}
int cuMemAlloc_v2(Handle* address, size_t size) {
    *address = Handle(reinterpret_cast<uintptr_t>(calloc(1, size)));
    return note("cuMemAlloc", std::to_string(size) + " mode " + std::to_string(capture_mode));
}
int cuMemFree_v2(Handle address) {
    free(reinterpret_cast<void*>(uintptr_t(address)));
    return note("cuMemFree", "mode " + std::to_string(capture_mode));
}
int cuCtxSynchronize() { return note("cuCtxSynchronize"); }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = 0;
    return note("cuDeviceGetAttribute", std::to_string(attribute) + " of " + std::to_string(device));
}
int cuMemHostRegister_v2(void*, size_t size, unsigned flags) {
    return note("cuMemHostRegister", std::to_string(size) + " flags " + std::to_string(flags));
}
int cuMemHostGetDevicePointer_v2(Handle* mapped, void* address, unsigned) {  // elsewhere than the host has it
    *mapped = Handle(reinterpret_cast<uintptr_t>(address)) + 0x0100000000000000ull;
    return note("cuMemHostGetDevicePointer");
}
int cuMemHostUnregister(void*) { return note("cuMemHostUnregister"); }
int cuStreamCreate(Handle* stream, unsigned flags) {
    *stream = next_handle += 0x10;
    return note("cuStreamCreate", std::to_string(flags));
}
int cuStreamSynchronize(Handle) { return note("cuStreamSynchronize"); }
int cuStreamDestroy_v2(Handle) { return note("cuStreamDestroy"); }
int cuMemcpyHtoDAsync_v2(Handle to, const void* from, size_t size, Handle) {
    memcpy(reinterpret_cast<void*>(uintptr_t(to)), from, size);
    return note("cuMemcpyHtoDAsync", std::to_string(size));
}
int cuLaunchKernel(Handle function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned shared,
                   Handle stream, void** arguments, void** extra) {
    const auto found = functions.find(function);
    if (found == functions.end() || extra != nullptr) return 400;
    if (found->second.second != current()) return 201;
    const std::string& name = found->second.first;
    const auto line = [&] {
        return name + " blocks " + std::to_string(blocks) + " threads " + std::to_string(threads) + " shared " +
               std::to_string(shared) + " stream " + text_of(stream) + " context " + text_of(current() - kContexts);
    };
    const int failed = muted ? 0 : note("cuLaunchKernel", line());
    if (failed != 0) return failed;
    for (void* library : libraries) {
        if (void* entry = dlsym(library, name.c_str())) {
            reinterpret_cast<void (*)(void**, int64_t)>(entry)(arguments, blocks);
        }
    }
    return 0;
}

}  // extern "C"

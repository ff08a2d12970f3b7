// An NVRTC that compiles nothing: its machine code says what was asked for. Each compilation is a line in the file that
// FAKE_NVRTC_LOG names.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Program {
    std::string name, code;
};
constexpr int kArchs[] = {70, 75, 80, 86, 90};
constexpr int kCount = sizeof(kArchs) / sizeof(kArchs[0]);

int copy(const std::string& from, char* to) {
    memcpy(to, from.c_str(), from.size() + 1);
    return 0;
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    *major = 14;
    *minor = 3;
    return 0;
}
const char* nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER"; }
int nvrtcGetNumSupportedArchs(int* count) {
    *count = kCount;
    return 0;
}
int nvrtcGetSupportedArchs(int* archs) {
    memcpy(archs, kArchs, sizeof(kArchs));
    return 0;
}
int nvrtcCreateProgram(Program** program, const char* source, const char* name, int, const char* const*, const char* const*) {
    if (strstr(source, "extern \"C\"") == nullptr) return 3;
    *program = new Program{name, ""};
    return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    program->code = "FAKE " + program->name;
    for (int k = 0; k < count; ++k) program->code += std::string(" ") + options[k];
    if (const char* path = getenv("FAKE_NVRTC_LOG")) {
        if (FILE* log = fopen(path, "a")) {
            fprintf(log, "%s\n", program->code.c_str());
            fclose(log);
        }
    }
    const char* broken = getenv("FAKE_NVRTC_BROKEN");
    return broken != nullptr && program->name == broken ? 6 : 0;
}
int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
int nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->code.size() + 1;
    return 0;
}
int nvrtcGetCUBIN(Program* program, char* to) { return copy(program->code, to); }
int nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program* program, char* to) { return copy(program->code, to); }
int nvrtcGetProgramLogSize(Program*, size_t* size) {
    *size = sizeof("line 7: error: nothing good");
    return 0;
}
int nvrtcGetProgramLog(Program*, char* to) { return copy("line 7: error: nothing good", to); }

}  // extern "C"

// Which SIMD level runs. Compiled for the baseline, so that it works on every machine.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_level.h"

namespace fp16opt {

// Defined by cpu.cpp, which the build compiles once for each level. The baseline is what every machine of the target
// runs: "portable", or "neon" on 64-bit ARM.
#ifndef FP16OPT_BASELINE
#define FP16OPT_BASELINE portable
#endif
#if defined(FP16OPT_X86)
inline namespace avx512 {
extern const CpuLevel level;
}
inline namespace avx2 {
extern const CpuLevel level;
}
#endif
inline namespace FP16OPT_BASELINE {
extern const CpuLevel level;
}

namespace {

std::atomic<const CpuLevel*> chosen{nullptr};

const CpuLevel* find(const char* name) {
    for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) {
        if (std::strcmp((*level)->name, name) == 0) return *level;
    }
    std::string names;
    for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) {
        names += std::string(names.empty() ? "" : ", ") + (*level)->name;
    }
    throw std::invalid_argument("SIMD level '" + std::string(name) + "' is not one that this build has and this machine " +
                                "runs: " + names + ". Unset FP16OPT_SIMD to take the fastest.");
}

}  // namespace

const CpuLevel* const* supported_levels() {
    static const CpuLevel* const* list = [] {
        static const CpuLevel* levels[4] = {};
        int count = 0;
#if defined(FP16OPT_X86)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            levels[count++] = &avx512::level;
        }
        if (avx2) levels[count++] = &avx2::level;
#endif
        levels[count] = &FP16OPT_BASELINE::level;
        return levels;
    }();
    return list;
}

const CpuLevel& current_level() {
    const CpuLevel* level = chosen.load(std::memory_order_acquire);
    if (level == nullptr) {
        const char* wanted = std::getenv("FP16OPT_SIMD");
        level = wanted != nullptr && *wanted != '\0' ? find(wanted) : supported_levels()[0];
        chosen.store(level, std::memory_order_release);
    }
    return *level;
}

void use_level(const char* name) { chosen.store(find(name), std::memory_order_release); }

}  // namespace fp16opt

// What every other header needs to compile for the host, for a device, and once for each SIMD level.
#pragma once

#include <cstdint>
#include <cstring>

// FP16OPT_INLINE: inlined always. What only prefetches must be: GCC takes it for a function without effects, and drops calls.
#if defined(__GNUC__)
#define FP16OPT_INLINE inline __attribute__((always_inline))
#else
#define FP16OPT_INLINE inline
#endif
#if defined(__CUDACC__)
#define FP16OPT_HD __host__ __device__ __forceinline__
#else
#define FP16OPT_HD FP16OPT_INLINE
#endif

#if defined(__GNUC__)
#define FP16OPT_NOINLINE __attribute__((noinline))
#define FP16OPT_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define FP16OPT_NOINLINE
#define FP16OPT_UNLIKELY(x) (x)
#endif

// The same headers are compiled once for each SIMD level and linked into one module. The level is part of every name,
// or the linker would keep one level's copy of an inline function for all of them, and run AVX-512 code anywhere.
#ifndef FP16OPT_LEVEL
#define FP16OPT_LEVEL common
#endif
#define FP16OPT_BEGIN namespace fp16opt { inline namespace FP16OPT_LEVEL {
#define FP16OPT_END } }

FP16OPT_BEGIN

// The bits of `from` as another type of the same size.
template <class To, class From>
FP16OPT_HD To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

FP16OPT_END

// The numbers of reports for every dtype, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "../launch/measures.h"
#include "measure_level.h"

FP16OPT_BEGIN
namespace {

Numbers measure_chunk(DType of, const void* grad, int64_t n) {
    switch (of) {
        case DType::half: return measured(static_cast<const Half*>(grad), n);
        case DType::bfloat16: return measured(static_cast<const BFloat16*>(grad), n);
        default: return measured(static_cast<const float*>(grad), n);
    }
}

template <class Master, class Weight>
Numbers compared(const void* master, const void* weight, const float* before, bool whole, int64_t start, int64_t n) {
    CompareLoop<Master, Weight> loop(n);
    loop.run(static_cast<const Master*>(master), static_cast<const Weight*>(weight), before, whole, start, n);
    return loop.found();
}

Numbers compare_chunk(DType of_master, DType of_weight, const void* master, const void* weight, const float* before,
                      bool whole, int64_t start, int64_t n) {
    if (of_master == DType::half) return compared<Half, Half>(master, weight, before, whole, start, n);
    if (of_master == DType::bfloat16) return compared<BFloat16, BFloat16>(master, weight, before, whole, start, n);
    switch (of_weight) {
        case DType::half: return compared<float, Half>(master, weight, before, whole, start, n);
        case DType::bfloat16: return compared<float, BFloat16>(master, weight, before, whole, start, n);
        default: return compared<float, float>(master, weight, before, whole, start, n);
    }
}

}  // namespace

extern const MeasureLevel measure_level;
const MeasureLevel measure_level = {measure_chunk, compare_chunk};

FP16OPT_END

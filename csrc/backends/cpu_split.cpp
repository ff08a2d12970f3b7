// Split masters of both dtypes, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "../launch/split.h"
#include "split_level.h"

FP16OPT_BEGIN
namespace {

template <class Model>
uint32_t split_as(const float* master, void* model, void* remainder, int64_t n) {
    SplitMaster<Model> to(model, remainder);
    split_loop(master, to, n);
    return to.flags();
}

uint32_t split_chunk(DType to, const float* master, void* model, void* remainder, int64_t n) {
    if (to == DType::half) return split_as<Half>(master, model, remainder, n);
    return split_as<BFloat16>(master, model, remainder, n);
}

void join_chunk(DType from, void* model, void* remainder, float* out, int64_t n) {
    if (from == DType::half) return join_loop(SplitMaster<Half>(model, remainder), out, n);
    return join_loop(SplitMaster<BFloat16>(model, remainder), out, n);
}

}  // namespace

extern const SplitLevel split_level;
const SplitLevel split_level = {split_chunk, join_chunk};

FP16OPT_END

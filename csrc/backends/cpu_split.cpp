// Split masters of both dtypes, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "../launch/split.h"
#include "../launch/tail.h"
#include "split_level.h"

FP16OPT_BEGIN
namespace {

// The incomplete block behind `whole` elements of 16 bits.
char* behind(void* array, int64_t whole) { return static_cast<char*>(array) + whole * 2; }

template <class Model>
uint32_t split_as(const float* master, void* model, void* remainder, int64_t n) {
    const int64_t rest = n % kBlock, whole = n - rest;
    SplitMaster<Model> to(model, remainder);
    split_loop(master, to, whole);
    if (rest == 0) return to.flags();
    Tail tail(rest, kBlock);
    SplitMaster<Model> last(tail.take(behind(model, whole), 2), tail.take(behind(remainder, whole), 2));
    split_loop(static_cast<const float*>(tail.read(master + whole, 4)), last, kBlock);
    tail.give_back();
    return to.flags() | last.flags();
}

template <class Model>
void join_as(void* model, void* remainder, float* out, int64_t n) {
    const int64_t rest = n % kBlock, whole = n - rest;
    join_loop(SplitMaster<Model>(model, remainder), out, whole);
    if (rest == 0) return;
    Tail tail(rest, kBlock);
    const SplitMaster<Model> last(tail.read(behind(model, whole), 2), tail.read(behind(remainder, whole), 2));
    join_loop(last, static_cast<float*>(tail.take(out + whole, 4)), kBlock);
    tail.give_back();
}

uint32_t split_chunk(DType to, const float* master, void* model, void* remainder, int64_t n) {
    if (to == DType::half) return split_as<Half>(master, model, remainder, n);
    return split_as<BFloat16>(master, model, remainder, n);
}

void join_chunk(DType from, void* model, void* remainder, float* out, int64_t n) {
    if (from == DType::half) return join_as<Half>(model, remainder, out, n);
    return join_as<BFloat16>(model, remainder, out, n);
}

}  // namespace

extern const SplitLevel split_level;
const SplitLevel split_level = {split_chunk, join_chunk};

FP16OPT_END

// All but the one-pass steps for every dtype, at one SIMD level. This file is compiled once for each level, with FP16OPT_LEVEL
// set to its name; see the note in core/macros.h. It uses nothing from the standard library but memcpy.
//
// A level is two files, this one and cpu_steps.cpp: each takes a second and more to read the compiler's vector functions.
#include "../functors/sample.h"
#include "../launch/changes.h"
#include "../launch/cpu.h"
#include "../launch/measures.h"
#include "../launch/split.h"
#include "../launch/tail.h"
#include "changes_level.h"
#include "cpu_level.h"
#include "measure_level.h"
#include "split_level.h"

FP16OPT_BEGIN
namespace {

template <class From, bool kWrites>
UnscaleResult unscale_loop(const void* grad, void* out, int64_t n, float inv_scale, bool add, bool stream) {
    UnscaleLoop<From, kWrites> loop{inv_scale, add, stream, Lanes(n)};
    const double sumsq = loop.run(static_cast<const From*>(grad), static_cast<float*>(out), n);
    return {sumsq, loop.flags};
}

template <class From>
UnscaleResult unscale_as(const void* grad, void* out, int64_t n, float inv_scale, bool add, bool stream) {
    if (out == nullptr) return unscale_loop<From, false>(grad, out, n, inv_scale, add, stream);
    return unscale_loop<From, true>(grad, out, n, inv_scale, add, stream);
}

template <class From>
void unscale_clipped_as(const void* grad, void* out, int64_t n, float inv_scale, float factor, bool stream) {
    UnscaleClippedLoop<From> loop{splat_for_sum(inv_scale), splat_for_sum(factor), stream};
    loop.run(static_cast<const From*>(grad), static_cast<float*>(out), n);
}

// Streaming stores need their own alignment, and pay only where nothing of the line is needed again.
bool may_stream(const void* to, bool wanted) {
    return kCanStream && wanted && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

UnscaleResult unscale_chunk(DType from, const void* grad, void* out, int64_t n, float inv_scale, bool add, bool stream) {
    stream = may_stream(out, stream) && !add && grad != out;
    switch (from) {
        case DType::half: return unscale_as<Half>(grad, out, n, inv_scale, add, stream);
        case DType::bfloat16: return unscale_as<BFloat16>(grad, out, n, inv_scale, add, stream);
        case DType::single: return unscale_as<float>(grad, out, n, inv_scale, add, stream);
        case DType::wide:
        case DType::byte: break;
    }
    UnscaleWideLoop loop{double(inv_scale), add, Lanes(n)};
    loop.run(static_cast<const double*>(grad), static_cast<double*>(out), n);
    return {loop.lanes.total(), loop.flags};
}

void unscale_clipped_chunk(DType from, const void* grad, void* out, int64_t n, float inv_scale, float factor, bool stream) {
    stream = may_stream(out, stream) && grad != out;
    switch (from) {
        case DType::half: return unscale_clipped_as<Half>(grad, out, n, inv_scale, factor, stream);
        case DType::bfloat16: return unscale_clipped_as<BFloat16>(grad, out, n, inv_scale, factor, stream);
        case DType::single: return unscale_clipped_as<float>(grad, out, n, inv_scale, factor, stream);
        case DType::wide:
        case DType::byte: break;
    }
    const double* of = static_cast<const double*>(grad);
    double* to = static_cast<double*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = scale(unscale(of[i], double(inv_scale)), double(factor));
}

double sum_of_squares_chunk(DType dtype, const void* values, int64_t n) {
    switch (dtype) {
        case DType::half: return sum_of_squares(static_cast<const Half*>(values), n);
        case DType::bfloat16: return sum_of_squares(static_cast<const BFloat16*>(values), n);
        case DType::single: return sum_of_squares(static_cast<const float*>(values), n);
        case DType::wide:
        case DType::byte: break;
    }
    return sum_of_squares(static_cast<const double*>(values), n);
}

uint64_t sample_words(const void* values, int64_t words) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < words; ++i) {
        uint64_t word;
        memcpy(&word, static_cast<const char*>(values) + 8 * i, sizeof(word));
        sum += sample_term(word, i);
    }
    return sum;
}

void scale_chunk(DType dtype, void* values, int64_t n, float factor) {
    switch (dtype) {
        case DType::half: return scale_values(static_cast<Half*>(values), n, factor);
        case DType::bfloat16: return scale_values(static_cast<BFloat16*>(values), n, factor);
        case DType::single: return scale_values(static_cast<float*>(values), n, factor);
        case DType::wide: return scale_values(static_cast<double*>(values), n, factor);
        case DType::byte: break;  // no operation hands it here
    }
}

void lerp_chunk(DType of, void* averages, const void* values, int64_t n, double part, bool from_average) {
    float* at = static_cast<float*>(averages);
    switch (of) {
        case DType::half: return lerp_values(at, static_cast<const Half*>(values), n, part, from_average);
        case DType::bfloat16: return lerp_values(at, static_cast<const BFloat16*>(values), n, part, from_average);
        case DType::single: return lerp_values(at, static_cast<const float*>(values), n, part, from_average);
        case DType::wide:
            return lerp_values(static_cast<double*>(averages), static_cast<const double*>(values), n, part, from_average);
        case DType::byte: break;  // no operation hands it here
    }
}

// Memory of a dtype that is known only at run time.
struct Stretch {
    DType dtype;
    char* at;

    FP16OPT_HD void get(int64_t i, Block& b) const { load_as(dtype, at + i * item_size(dtype), b); }
    FP16OPT_HD void set(int64_t i, const Block& b) const {
        switch (dtype) {
            case DType::half: return put(reinterpret_cast<Half*>(at) + i, b);
            case DType::bfloat16: return put(reinterpret_cast<BFloat16*>(at) + i, b);
            default: return put(reinterpret_cast<float*>(at) + i, b);
        }
    }
};

bool axpby_chunk(const DType (&dtypes)[3], float a, const void* x, float b, const void* y, void* out, int64_t n,
                 uint32_t check) {
    const Floats by_x = splat(a), by_y = splat(b);
    bool bad = false;
    auto block = [&](const Stretch& xs, const Stretch& ys, const Stretch& outs, int64_t i) {
        Block u, v;
        xs.get(i, u);
        ys.get(i, v);
        bad |= (check & kCheckX) != 0 && any_from(u, kInfinity);
        bad |= (check & kCheckY) != 0 && any_from(v, kInfinity);
        for (int k = 0; k < kVectors; ++k) u.v[k] = axpby(by_x, u.v[k], by_y, v.v[k]);
        outs.set(i, u);
    };
    const Stretch xs{dtypes[0], static_cast<char*>(const_cast<void*>(x))};
    const Stretch ys{dtypes[1], static_cast<char*>(const_cast<void*>(y))};
    const Stretch outs{dtypes[2], static_cast<char*>(out)};
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) block(xs, ys, outs, i);
    if (i < n) {
        char padded[3][kBlock * sizeof(float)] = {};
        const int64_t size[3] = {item_size(dtypes[0]), item_size(dtypes[1]), item_size(dtypes[2])};
        memcpy(padded[0], xs.at + i * size[0], size_t((n - i) * size[0]));
        memcpy(padded[1], ys.at + i * size[1], size_t((n - i) * size[1]));
        block({dtypes[0], padded[0]}, {dtypes[1], padded[1]}, {dtypes[2], padded[2]}, 0);
        memcpy(outs.at + i * size[2], padded[2], size_t((n - i) * size[2]));
    }
    return bad;
}

template <class To>
uint32_t cast_as(const float* master, void* param, int64_t n, bool stream) {
    CastLoop<To> loop{stream};
    loop.run(master, static_cast<To*>(param), n);
    return loop.flags;
}

uint32_t cast_chunk(DType to, const float* master, void* param, int64_t n, bool stream) {
    stream = may_stream(param, stream);
    if (to == DType::half) return cast_as<Half>(master, param, n, stream);
    return cast_as<BFloat16>(master, param, n, stream);
}

// -- split masters -----------------------------------------------------------------------------------------------------

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

// -- the numbers of reports --------------------------------------------------------------------------------------------

Numbers measure_chunk(DType of, const void* grad, int64_t n) {
    switch (of) {
        case DType::half: return measured(static_cast<const Half*>(grad), n);
        case DType::bfloat16: return measured(static_cast<const BFloat16*>(grad), n);
        default: return measured(static_cast<const float*>(grad), n);
    }
}

Numbers compare_chunk(DType of_master, DType of_weight, const void* master, const void* weight, const float* before,
                      bool whole, int64_t start, int64_t n) {
    CompareLoop loop(of_master, of_weight, n);
    loop.run(static_cast<const char*>(master), static_cast<const char*>(weight), before, whole, start, n);
    return loop.found();
}

// -- which weights got other bits --------------------------------------------------------------------------------------

uint32_t mark_part(const uint16_t* before, const uint16_t* after, int64_t n, int64_t place, uint64_t* bits, bool shared) {
    return mark_words(before, after, n, place, bits, shared);
}

uint64_t digest_part(const uint16_t* words, int64_t n, uint32_t first) { return digest_words(words, n, first); }

uint32_t guard_part(const uint16_t* words, int64_t n, int64_t place) { return guard_words(words, n, place); }

int64_t count_part(const uint64_t* bits, int64_t n) { return count_bits(bits, n); }

}  // namespace

#define FP16OPT_NAME_OF(level) #level
#define FP16OPT_NAME(level) FP16OPT_NAME_OF(level)

extern const StepLevel step_level;  // cpu_steps.cpp
extern const State8Level state8_level;  // cpu_steps.cpp
namespace {
const SplitLevel split_level = {split_chunk, join_chunk};
const MeasureLevel measure_level = {measure_chunk, compare_chunk};
const ChangesLevel changes_level = {mark_part, digest_part, guard_part, count_part};
}  // namespace
extern const CpuLevel level;
const CpuLevel level = {FP16OPT_NAME(FP16OPT_LEVEL), unscale_chunk, unscale_clipped_chunk, sum_of_squares_chunk, scale_chunk,
                        lerp_chunk, axpby_chunk, cast_chunk, sample_words,
                        &step_level, &split_level, &state8_level, &measure_level, &changes_level};

FP16OPT_END

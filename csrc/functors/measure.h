// What one element of a gradient, or of a step, adds to the numbers that reports are made of.
#pragma once

#include "cast.h"
#include "l2norm.h"

namespace fp16opt {

// The numbers of a gradient, and of a step. `kLargest` is a float's magnitude as bits, of which the largest counts; all
// else is added up.
enum Measured : int { kGradSumsq, kLargest, kZero, kSubnormal, kNearOverflow, kMeasured };
enum Compared : int { kMasterSumsq, kDistanceSumsq, kChangeSumsq, kChange, kUlp, kMoved, kLost, kCompared };
constexpr int kMostNumbers = 8;

struct Numbers {
    double v[kMostNumbers];
};

}  // namespace fp16opt

FP16OPT_BEGIN

// Of which groups of a tensor the step is measured: of all where it is short, else of every 17th.
constexpr int64_t kMeasuredWhole = 16384, kMeasuredStride = 17;

// Magnitudes of 16-bit numbers, as bits: the smallest normal one, half of the largest finite one. What is not finite is beyond.
template <class T>
struct Magnitudes {
    static constexpr int kNormal = 0, kLarge = 0x8000;
};
template <>
struct Magnitudes<Half> {
    static constexpr int kNormal = 0x0400, kLarge = 0x77ff;
};
template <>
struct Magnitudes<BFloat16> {
    static constexpr int kNormal = 0x0080, kLarge = 0x7eff;
};

FP16OPT_HD uint32_t magnitude_bits(float value) { return bit_cast<uint32_t>(value) & 0x7fffffffu; }

FP16OPT_HD double joined(bool takes_largest, double sum, double part) {
    return !takes_largest ? sum + part : sum < part ? part : sum;
}

// The distance from a weight to the next larger one of its 16-bit type; 0 where it has no 16 bits.
template <class Weight>
FP16OPT_HD float ulp_of(float) {
    return 0.0f;
}
FP16OPT_HD float power_of(float value, float least) {
    const float power = bit_cast<float>(bit_cast<uint32_t>(value) & 0x7f800000u);
    return power < least ? least : power;
}
template <>
FP16OPT_HD float ulp_of<Half>(float value) {
    return power_of(value, 0x1p-14f) * 0x1p-10f;
}
template <>
FP16OPT_HD float ulp_of<BFloat16>(float value) {
    return power_of(value, 0x1p-126f) * 0x1p-7f;
}

struct GroupOfStep {
    double sumsq, change, ulp;
    int moved, lost;
};

// Of the first `valid` elements of a group; those behind must be zero.
template <class Weight>
FP16OPT_HD GroupOfStep group_of_step(const float* before, const float* after, int valid) {
    float change[kGroup];
    double size[kGroup], ulp[kGroup];
    int moved = 0, lost = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float gap = i < valid ? ulp_of<Weight>(before[i]) : 0.0f;
        change[i] = after[i] - before[i];
        const float magnitude = bit_cast<float>(magnitude_bits(change[i]));
        size[i] = double(magnitude);
        ulp[i] = double(gap);
        moved += magnitude != 0.0f;
        lost += magnitude != 0.0f && magnitude < gap * 0.5f;
    }
    return {group_term<float>(change),
            group_sum(size[0], size[1], size[2], size[3], size[4], size[5], size[6], size[7]),
            group_sum(ulp[0], ulp[1], ulp[2], ulp[3], ulp[4], ulp[5], ulp[6], ulp[7]), moved, lost};
}

FP16OPT_END

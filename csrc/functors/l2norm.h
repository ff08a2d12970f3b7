// The term of a sum of squares, and the small tree in which eight consecutive ones are added.
#pragma once

#include "cast.h"

FP16OPT_BEGIN

constexpr int kGroup = 8;    // consecutive elements, added in the tree below
constexpr int kLanes = 256;  // running sums of a chunk: a group goes to the lane of its number modulo this

// Of which storage types the values are squared as they are stored, and not as products: their squares are exact in float32.
template <class From>
constexpr bool kSumsStored = false;
template <>
constexpr bool kSumsStored<Half> = true;
template <>
constexpr bool kSumsStored<BFloat16> = true;

// Between an element and its lane lie three roundings to float32 at most, so the sum is true to 3 * 2^-24: a group's
// squares are added in float32 where these are exact; where not, only as far as its two halves. Consumer GPUs have one
// unit for doubles beside 32 or 64 for floats. What leaves float32's range shows in the group's sum: above, it is infinite;
// below kLeastSum what squares lost (2^-150 each) might count. Such a group is computed again in doubles, where the square
// of any finite float32 is exact and in range. FP16 never leaves it (2^-48 to 2^35). From groups on all is added in doubles.
constexpr float kLeastSum = 0x1p-100f, kMostSum = 0x1.fffffep127f;
template <class Of>
constexpr bool kStaysInRange = false;
template <>
constexpr bool kStaysInRange<Half> = true;

FP16OPT_HD bool is_in_range(float sum) { return sum >= kLeastSum && sum <= kMostSum; }  // a nan is not

template <class T>
FP16OPT_HD T square(T value) {
    return value * value;
}

template <class T>
FP16OPT_HD T group_sum(T e0, T e1, T e2, T e3, T e4, T e5, T e6, T e7) {
    return ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7));
}

FP16OPT_HD float four_squares(const float* e) {
    return (square(e[0]) + square(e[1])) + (square(e[2]) + square(e[3]));
}

// What a group adds to its lane. `Of` is the type of values as they are stored, float for all others.
template <class Of>
FP16OPT_HD double group_term(const float* e) {
    const float front = four_squares(e), back = four_squares(e + 4), sum = front + back;
    if (kStaysInRange<Of> || is_in_range(sum)) return kSumsStored<Of> ? double(sum) : double(front) + double(back);
    return group_sum(square(double(e[0])), square(double(e[1])), square(double(e[2])), square(double(e[3])),
                     square(double(e[4])), square(double(e[5])), square(double(e[6])), square(double(e[7])));
}

FP16OPT_END

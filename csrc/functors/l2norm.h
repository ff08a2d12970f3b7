// The term of a sum of squares, and the small tree in which eight consecutive ones are added.
#pragma once

#include "cast.h"

FP16OPT_BEGIN

constexpr int kGroup = 8;    // consecutive elements, added in the tree below
constexpr int kLanes = 256;  // running sums of a chunk: a group goes to the lane of its number modulo this

// Of which storage types the values are squared as they are stored, and a group of them is added, in float32: the square
// of an FP16 number is exact there, and eight of them neither overflow nor vanish (2^-48 to 2^35). The squares of other
// types, and of sums, are taken in doubles, where that of any finite float32 is exact and in range. From groups on all
// is added in doubles.
template <class From>
constexpr bool kSumsStored = false;
template <>
constexpr bool kSumsStored<Half> = true;

template <class T>
FP16OPT_HD T square(T value) {
    return value * value;
}

template <class T>
FP16OPT_HD T group_sum(T e0, T e1, T e2, T e3, T e4, T e5, T e6, T e7) {
    return ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7));
}

FP16OPT_END

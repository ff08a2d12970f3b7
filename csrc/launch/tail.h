// The last, incomplete block of a chunk, in memory of its own, so that the loops of steps know whole blocks only. Behind its
// elements are copies of the first one, which flag and exceed nothing that it doesn't; what becomes of them is dropped.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

constexpr int kLongestTail = 128;

class Tail {
public:
    // Of each array the last `valid` elements of a block of `block`.
    Tail(int64_t valid, int block) : valid_(valid), block_(block) {}

    // The whole block that stands for the elements of `size` bytes at `from`.
    void* read(const void* from, int64_t size) {
        char* to = memory_[count_];
        place_[count_] = {nullptr, 0};
        ++count_;
        if (size == 1) {
            fill<uint8_t>(from, to);
        } else if (size == 2) {
            fill<uint16_t>(from, to);
        } else {
            fill<uint32_t>(from, to);
        }
        return to;
    }
    // One that `give_back` writes to where it came from.
    void* take(void* from, int64_t size) {
        void* to = read(from, size);
        place_[count_ - 1] = {from, size};
        return to;
    }
    void give_back() const {
        for (int k = 0; k < count_; ++k) {
            if (place_[k].at != nullptr) memcpy(place_[k].at, memory_[k], size_t(valid_ * place_[k].size));
        }
    }

private:
    template <class Word>
    void fill(const void* from, char* to) const {
        Word first;
        memcpy(&first, from, sizeof(Word));
        for (int k = 0; k < block_; ++k) memcpy(to + size_t(k) * sizeof(Word), &first, sizeof(Word));
        memcpy(to, from, size_t(valid_) * sizeof(Word));
    }

    struct Place {
        void* at;
        int64_t size;
    };

    alignas(64) char memory_[6][kLongestTail * sizeof(float)];
    Place place_[6];
    int64_t valid_;
    int block_;
    int count_ = 0;
};

FP16OPT_END

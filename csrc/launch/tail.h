// The last block of a chunk that does not end with one, in memory of its own, so that the loops of steps know whole blocks
// only. Where there are too few elements, copies of the first one stand behind them, which flag and exceed nothing that it
// doesn't; what becomes of them is dropped.
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
            if (place_[k].at != nullptr) copy(place_[k].at, memory_[k], size_t(valid_ * place_[k].size));
        }
    }

private:
    template <class Word>
    void fill(const void* from, char* to) const {
        if (valid_ < block_) {
            Word first;
            memcpy(&first, from, sizeof(Word));
            for (int k = 0; k < block_; ++k) memcpy(to + size_t(k) * sizeof(Word), &first, sizeof(Word));
        }
        copy(to, from, size_t(valid_) * sizeof(Word));
    }
    // Whole blocks go as the loops read and write them: a load of what two stores have made waits for both.
    void copy(void* to, const void* from, size_t bytes) const {
        if (valid_ < block_) {
            memcpy(to, from, bytes);
            return;
        }
        for (size_t line = 0; line < bytes; line += 64) memcpy(static_cast<char*>(to) + line, static_cast<const char*>(from) + line, 64);
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

// The operations on lists of tensors in the memory of a GPU, free of Python and torch. Nothing here waits for the GPU.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/dtype.h"
#include "launch/pack.h"

namespace fp16opt {

using Pointers = std::vector<void*>;  // by place
using Stream = void*;                 // a cudaStream_t

constexpr int kMostLists = 6;

// Lists of tensors, and how they are written down for the GPU: first what changes with the addresses, then what does not,
// then memory that a kernel's blocks share. Python allocates that memory and copies into it what fill() wrote.
class CudaTable {
public:
    // `numels`, `rows` and each of `dtypes` are by place; only the tensors at `places` take part.
    // Throws std::invalid_argument where they do not fit together.
    CudaTable(const std::vector<int64_t>& numels, const std::vector<int64_t>& rows,
              const std::vector<std::vector<DType>>& dtypes, const std::vector<int32_t>& places);

    // Takes in addresses, by list and place, and flags, by place or none. True where something is not as it was.
    bool point(const std::vector<Pointers>& lists, const std::vector<uint8_t>& add);

    int64_t changing_bytes() const;  // the first part
    int64_t copied_bytes() const;    // the first two
    int64_t all_bytes() const;
    // Writes the first part, or the first two, to host memory.
    void fill(void* host, bool both) const;

    int64_t chunk_count() const { return int64_t(chunks_.size()); }
    int32_t entries() const { return int32_t(entries_.size()); }
    int32_t filled() const;  // entries that have elements
    int lists() const { return lists_; }
    // Throws std::invalid_argument: the table was made for more or fewer lists, or has a row outside of n.
    void require(int lists, int64_t n) const;
    // Throws std::invalid_argument where a tensor of the list has none of these types.
    void require_dtypes(int list, std::initializer_list<DType> allowed) const;

private:
    struct Item {
        int64_t numel, row;
        int32_t place;
        int8_t dtypes[kMostLists];
    };

    int lists_;
    size_t length_;  // of the lists
    std::vector<Item> entries_;
    std::vector<Chunk> chunks_;
    std::vector<int64_t> first_chunk_;
    std::vector<void*> pointers_;  // [list * entries + entry]
    std::vector<uint8_t> add_;
};

// Where an operation runs. `memory` holds all_bytes() of the table, aligned to 16 bytes, in which fill()'s bytes are.
struct Launch {
    const CudaTable& table;
    void* memory;
    int device;
    Stream stream;
};

struct CudaGradRows {  // of n tensors
    int32_t* nonfinite;
    double* sumsq;
    int64_t n;
    double* norm;
    float* found_inf;
    bool write;  // false: outs stay as they are
};

// All of these throw std::runtime_error with CUDA's own words where a launch fails, and std::invalid_argument for a table
// that was made for something else. What is read besides the lists, a factor too, is in the GPU's memory.
void cuda_unscale(const Launch& launch, const float* inv_scale, const CudaGradRows& rows);
void cuda_unscale_clipped(const Launch& launch, const float* inv_scale, const float* factor);
void cuda_l2norm(const Launch& launch, double* sumsq, int64_t n, double* norm, double* norms);
void cuda_scale(const Launch& launch, const float* factor);
void cuda_axpby(const Launch& launch, float a, float b, bool check_x, bool check_y, float* found_inf);
void cuda_cast(const Launch& launch, int32_t* overflow, int64_t n);
void cuda_sample(const Launch& launch, int64_t* samples, int64_t n);
// Masters take the model's values where they differ, in tensors where a digest of `now` is not that of `then`.
void cuda_take(const Launch& launch, const int64_t* now, const int64_t* then, int32_t* taken, int64_t n);

// What a step decides, and its end: single numbers in the GPU's memory.
struct CudaPlace {
    int device;
    Stream stream;
};

struct CudaClosing {
    const float* found_inf;  // 0 or 1; null where nobody is told of an overflow here
    float* last;             // becomes found_inf; or null
    double* skipped;         // found_inf is added; or null
    float* scale;            // follows, with `settings` and the two counts; null for a static scale
    int32_t *clean, *skips;
    const double* settings;  // a ScaleSettings
    const int32_t* flags;    // n of them
    int32_t* kept;           // take their values
    int64_t n;
    uint32_t* cleared;  // `words` of them become 0
    int64_t words;
};

void cuda_capture_scale(const CudaPlace& place, const float* scale, float* pair);
// `found_inf` may be null. With `only_finite` the factor is 1 also where the norm is not finite.
void cuda_decide_clip(const CudaPlace& place, const double* norm, const float* found_inf, double max_norm,
                      bool only_finite, float* single, float* factor);
void cuda_close_step(const CudaPlace& place, const CudaClosing& closing);

// Whether this module holds code that runs on the device. False, too, where there is no device or driver.
bool cuda_runs_on(int device);

// Memory of the device that begins with these bytes, for a graph that is being captured. Waits for the copy, not for the
// stream that captures. It is the caller's to give back, once no graph that reads it is replayed any more.
void* cuda_keep(const void* host, int64_t copied, int64_t all, int device);
// Waits for the device, and reports nothing: where it fails CUDA is at an end, and with it the memory.
void cuda_give_back(void* memory, int device) noexcept;

}  // namespace fp16opt

// The operations over lists of tensors, free of Python and torch: pointers, numbers and nothing else. The caller answers
// for the pointers. A Table never changes once made, so several threads may use one at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/cpu_level.h"
#include "launch/pack.h"

namespace fp16opt {

struct Marks;  // api_changes.h

// Lists of tensors without their addresses. All vectors are by entry; only the tensors at `places` take part.
struct Table {
    std::vector<int64_t> numels;
    std::vector<std::vector<DType>> dtypes;    // one vector for each list
    std::vector<int32_t> places;
    std::vector<Chunk> chunks;
    int64_t elements = 0;

    // Throws std::invalid_argument where the vectors do not fit together. `pieces` are by entry; empty: tensors are whole.
    Table(std::vector<int64_t> numels, std::vector<std::vector<DType>> dtypes, std::vector<int32_t> places,
          const std::vector<Piece>& pieces = {});
};

using Pointers = std::vector<void*>;  // by entry

struct GradRows {  // of n tensors
    int32_t* nonfinite;
    double* sumsq;
    int64_t n;
    double* norm;
    float* found_inf;
};

// outs[i] = grads[i] * inv_scale, or += where add[place]; then norm and found_inf over all n rows.
// With `writes` false the outs stay as they are, and the rest is as if they were written.
// The lists are grads and outs; without `writes` there need be no outs.
void unscale(const Table& table, const std::vector<Pointers>& lists, float inv_scale, const std::vector<uint8_t>& add,
             bool writes, const GradRows& rows, int threads);

// outs[i] = (grads[i] * inv_scale) * factor.
void unscale_clipped(const Table& table, const Pointers& grads, const Pointers& outs, float inv_scale, float factor,
                     int threads);

// sumsq rows of the table's tensors; then each norm, and the total over all n rows.
void l2norm(const Table& table, const Pointers& tensors, double* sumsq, int64_t n, double* norm, double* norms,
            int threads);

void scale(const Table& table, const Pointers& tensors, float factor, int threads);

// averages[i] goes the part `weight` of the way to values[i].
void lerp(const Table& table, const Pointers& averages, const Pointers& values, double part, bool from_average,
          int threads);

// Returns whether a checked input is not finite.
bool axpby(const Table& table, float a, const Pointers& xs, float b, const Pointers& ys, const Pointers& outs,
           uint32_t check, int threads);

void cast(const Table& table, const Pointers& masters, const Pointers& params, int32_t* overflow, const Marks& marks,
          int threads);

// The digest of each 16-bit tensor's sample (functors/sample.h), by row.
void sample(const Table& table, const Pointers& tensors, int64_t* samples, int threads);

// A clip's outcome, two numbers (functors/clip.h), and how a scale follows a step (functors/loss_scale.h).
void clip_decision(const double* norm, const float* found_inf, double max_norm, bool only_finite, float* single, float* factor);
void follow_scale(bool overflow, float* scale, int32_t* clean, int32_t* skips, const void* settings);

}  // namespace fp16opt

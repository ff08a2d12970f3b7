// The one-pass steps over lists of tensors, free of Python and torch like api.h.
#pragma once

#include <string>

#include "api_changes.h"

namespace fp16opt {

// The lists of a step. The table's lists are grads, masters, those of `state` and, where it has them, `models`.
struct StepLists {
    const Table& table;
    const Pointers& grads;
    const Pointers& masters;
    std::vector<const Pointers*> state;  // the formula's, in its order
    const Pointers* models;  // nullptr: parameters that are their own masters
    std::vector<int32_t> group_of;  // by entry
    // By entry, written for tensors with a model: what `cast` writes.
    int32_t* overflow;
    Marks marks;  // of what models get
    uint32_t number = 0;  // of this step, by which codes and remainders of 8 bits are rounded
};

// What a step is told beside its lists, whatever its formula.
struct StepGiven {
    const Pointers* scales;  // of a formula that is coded: by entry, one float32 for each block of 128 elements
    const Pointers* steps;   // of one that counts: by entry, the float32 number of steps done, which is counted up
    const std::vector<uint8_t>& first;  // by entry, whether the state holds nothing yet
    const std::string& groups;          // the param_groups' structs, one behind the other
    float inv_scale, coefficient;
    int threads;
};

struct StepFormula {
    const char* name;
    bool counts;
    bool is_coded;  // its state is kept in codes of 8 bits (functors/ratio8.h)
    void (*step)(const StepLists& lists, const StepGiven& given);
};

// One of functors/, by its struct's name, or Adam8 or Sgd8. Throws std::invalid_argument where this build has none of it.
const StepFormula& formula_named(const std::string& name);

}  // namespace fp16opt

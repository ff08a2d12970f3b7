// Split masters over lists of tensors, free of Python and torch like api.h.
#pragma once

#include "api.h"

namespace fp16opt {

// The table's lists are masters, models and remainders; overflow is by row and as `cast` writes it.
void split(const Table& table, const Pointers& masters, const Pointers& models, const Pointers& remainders,
           int32_t* overflow, const Marks& marks, int threads);

// The table's lists are models, remainders and outs.
void join(const Table& table, const Pointers& models, const Pointers& remainders, const Pointers& outs, int threads);

}  // namespace fp16opt

// Gradients in codes of 8 bits over lists of tensors, free of Python and torch like api.h.
#pragma once

#include "api.h"

namespace fp16opt {

// The table's lists are grads and codes; scales have one float32 for each block of 256 elements, by place.
void encode(const Table& table, const Pointers& grads, const Pointers& codes, const Pointers& scales, int threads);

// The table's lists are codes and outs.
void decode(const Table& table, const Pointers& codes, const Pointers& outs, const Pointers& scales, int threads);

}  // namespace fp16opt

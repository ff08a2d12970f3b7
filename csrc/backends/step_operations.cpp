// The one-pass steps over lists of tensors on the CPU.
#include "../api_steps.h"

#include <cmath>

#include "../functors/power.h"
#include "../functors/scalars.h"
#include "../functors/ratio8.h"
#include "../functors/split24.h"
#include "lists.h"
#include "state8_level.h"

namespace fp16opt {
namespace {

bool is_narrow(DType dtype) { return item_size(dtype) == 2; }

void require_lists(const StepLists& lists, size_t groups, DType state = DType::single) {
    const Table& table = lists.table;
    const size_t count = 2 + lists.state.size() + (lists.models != nullptr ? 1 : 0);
    require(table.dtypes.size() == count, "the table was made for another number of lists");
    std::vector<const Pointers*> all = lists.state;
    all.insert(all.end(), {&lists.grads, &lists.masters});
    if (lists.models != nullptr) all.push_back(lists.models);
    for (const Pointers* list : all) require(list->size() == table.numels.size(), "a list does not have the table's length");
    require(lists.group_of.size() == table.numels.size(), "group_of must have one entry for each tensor");
    for (int32_t place : table.places) {
        const size_t i = size_t(place);
        require(lists.group_of[i] >= 0 && size_t(lists.group_of[i]) < groups, "a group lies outside the groups");
        for (size_t list = 2; list < 2 + lists.state.size(); ++list) {
            require(table.dtypes[list][i] == state, "state must be float32, or codes of 8 bits");
        }
        const DType master = table.dtypes[1][i];
        require(master == DType::single || (lists.models != nullptr && (is_narrow(master) || master == DType::byte)),
                "masters must be float32, or remainders beside models");
        const DType grad = table.dtypes[0][i];
        if (lists.models == nullptr) {
            require(grad == DType::single, "the gradient of a parameter that is its own master must be float32");
        } else {
            const DType model = table.dtypes.back()[i];
            require(is_narrow(model) && (grad == model || grad == DType::single),
                    "models must be 16 bits wide, and gradients float32 or of the model's dtype");
        }
    }
}

StepChunk chunk_of(const StepLists& lists, const Chunk& c, bool stream) {
    const Table& table = lists.table;
    StepChunk chunk{};
    chunk.grad_dtype = table.dtypes[0][size_t(c.tensor)];
    chunk.grad = at<void>(lists.grads, table, 0, c);
    chunk.master = at<void>(lists.masters, table, 1, c);
    for (size_t k = 0; k < lists.state.size(); ++k) chunk.state[k] = at<void>(*lists.state[k], table, 2 + k, c);
    if (lists.models != nullptr) {
        const size_t list = 2 + lists.state.size();
        chunk.model_dtype = table.dtypes[list][size_t(c.tensor)];
        chunk.model = at<void>(*lists.models, table, list, c);
    }
    chunk.numel = c.numel;
    const DType master = table.dtypes[1][size_t(c.tensor)];
    chunk.split = is_narrow(master);
    chunk.split24 = master == DType::byte;
    chunk.master_dither = master_dither_at(uint64_t(c.start), lists.number);
    chunk.stream = stream;
    return chunk;
}

// Runs `step(chunk, part)` on all chunks and keeps the flags of what they wrote; `part` is the chunk in the table.
template <class Step>
void run(const StepLists& lists, int threads, Step&& step) {
    const Table& table = lists.table;
    const bool narrows = lists.models != nullptr;
    for (int32_t place : table.places) {
        if (!narrows) break;
        lists.overflow[table.rows[size_t(place)]] = 0;
    }
    const bool stream = table.elements * 2 >= kStepStreamingThreshold;
    for_chunks<uint32_t>(
        table, threads,
        [&](const Chunk& c) {
            const auto state = [&](size_t k) { return k < lists.state.size() ? lists.state[k] : nullptr; };
            prefetch_next(table, c, {&lists.grads, &lists.masters, state(0), state(1), state(2), lists.models});
            return step(chunk_of(lists, c, stream), c);
        },
        [&](size_t place, uint32_t flags) {
            if (narrows) lists.overflow[table.rows[place]] |= int32_t(flags);
        });
}

GradFactors factors_of(float inv_scale, float coefficient, bool maximize) {
    return {inv_scale, maximize ? -coefficient : coefficient};
}

// Counts up, and by place the numbers of the step.
std::vector<AdamScalars> scalars_of(const StepLists& lists, const Pointers& steps, const std::vector<AdamOptions>& groups) {
    require(steps.size() == lists.table.numels.size(), "steps must have one entry for each tensor");
    std::vector<AdamScalars> scalars(steps.size());
    int32_t last_group = -1;
    float last_step = 0.0f;
    const AdamScalars* last = nullptr;
    for (int32_t place : lists.table.places) {
        const size_t i = size_t(place);
        float* step = static_cast<float*>(steps[i]);
        *step += 1.0f;
        const AdamOptions& o = groups[size_t(lists.group_of[i])];
        if (last != nullptr && last_group == lists.group_of[i] && last_step == *step) {
            scalars[i] = *last;
        } else {
            const double t = double(*step);
            scalars[i] = adam_scalars(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled, power(o.beta1, t),
                                      std::sqrt(1.0 - power(o.beta2, t)));
        }
        last = &scalars[i];
        last_group = lists.group_of[i];
        last_step = *step;
    }
    return scalars;
}

SgdScalars scalars_of(const SgdOptions& o, bool first) {
    return sgd_scalars(o.lr, o.momentum, o.dampening, o.weight_decay, o.nesterov, first);
}

State8Chunk codes_of(const StepLists& lists, const Pointers& scales_of, const Chunk& part, float limit) {
    float* scales = static_cast<float*>(scales_of[size_t(part.tensor)]) + part.start / kStateBlock;
    return {scales, limit, dither_at(uint64_t(part.start), lists.number)};
}

static_assert(kChunk % kStateBlock == 0, "chunks begin where blocks do");

}  // namespace

void adam(const StepLists& lists, const Pointers& steps, const std::vector<AdamOptions>& groups, float inv_scale,
          float coefficient, int threads) {
    require_lists(lists, groups.size());
    require(lists.state.size() == 2 || lists.state.size() == 3, "Adam's state is two or three lists");
    const std::vector<AdamScalars> scalars = scalars_of(lists, steps, groups);
    const auto* level = current_level().steps;
    run(lists, threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const AdamOptions& o = groups[size_t(lists.group_of[place])];
        return level->adam(chunk, factors_of(inv_scale, coefficient, o.maximize), scalars[place]);
    });
}

void adam8(const StepLists& lists, const Pointers& scales, const Pointers& steps, const std::vector<AdamOptions>& groups,
           const std::vector<float>& limits, float inv_scale, float coefficient, int threads) {
    require_lists(lists, groups.size(), DType::byte);
    require(lists.state.size() == 2 && limits.size() == groups.size(), "Adam's 8-bit state is two lists, with a limit a group");
    require(scales.size() == lists.table.numels.size(), "scales must have one entry for each tensor");
    const std::vector<AdamScalars> scalars = scalars_of(lists, steps, groups);
    const auto* level = current_level().state8;
    run(lists, threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor), group = size_t(lists.group_of[place]);
        return level->adam(chunk, codes_of(lists, scales, part, limits[group]),
                           factors_of(inv_scale, coefficient, groups[group].maximize), scalars[place]);
    });
}

void sgd(const StepLists& lists, const std::vector<uint8_t>& first, const std::vector<SgdOptions>& groups, float inv_scale,
         float coefficient, int threads) {
    require_lists(lists, groups.size());
    require(first.size() == lists.table.numels.size(), "first must have one entry for each tensor");
    require(lists.state.size() <= 1, "SGD's state is one list at most");
    const auto* level = current_level().steps;
    run(lists, threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const SgdOptions& o = groups[size_t(lists.group_of[place])];
        return level->sgd(chunk, factors_of(inv_scale, coefficient, o.maximize), scalars_of(o, first[place] != 0));
    });
}

void sgd8(const StepLists& lists, const Pointers& scales, const std::vector<uint8_t>& first,
          const std::vector<SgdOptions>& groups, float inv_scale, float coefficient, int threads) {
    require_lists(lists, groups.size(), DType::byte);
    require(first.size() == lists.table.numels.size(), "first must have one entry for each tensor");
    require(lists.state.size() == 1, "SGD's 8-bit state is one list");
    require(scales.size() == lists.table.numels.size(), "scales must have one entry for each tensor");
    const auto* level = current_level().state8;
    run(lists, threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const SgdOptions& o = groups[size_t(lists.group_of[place])];
        return level->sgd(chunk, codes_of(lists, scales, part, 1.0f), factors_of(inv_scale, coefficient, o.maximize),
                          scalars_of(o, first[place] != 0));
    });
}

void lion(const StepLists& lists, const std::vector<LionOptions>& groups, float inv_scale, float coefficient, int threads) {
    require_lists(lists, groups.size());
    require(lists.state.size() == 1, "Lion's state is one list");
    const auto* level = current_level().steps;
    run(lists, threads, [&](const StepChunk& chunk, const Chunk& part) {
        const LionOptions& o = groups[size_t(lists.group_of[size_t(part.tensor)])];
        const LionScalars scalars = lion_scalars(o.lr, o.beta1, o.beta2, o.weight_decay);
        return level->lion(chunk, factors_of(inv_scale, coefficient, o.maximize), scalars);
    });
}

}  // namespace fp16opt

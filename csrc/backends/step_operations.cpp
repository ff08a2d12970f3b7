// The one-pass steps over lists of tensors on the CPU.
#include "../api_steps.h"

#include <cstring>

#include "formulas.h"

#include "../functors/ratio8.h"
#include "../functors/split24.h"
#include "lists.h"
#include "marking.h"
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
    chunk.states = int(lists.state.size());
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
    chunk.master_dither = master_dither_at(c.index, lists.number);
    chunk.stream = stream;
    return chunk;
}

// Has the step mark what it changes.
void mark_in(const Marks& marks, const Table& table, const Chunk& c, StepChunk& chunk) {
    uint64_t* const own = marks.memory + marks.offsets[size_t(c.tensor)];
    chunk.guard = reinterpret_cast<uint32_t*>(own);
    chunk.bits = own + 1;
    chunk.place = c.start;
    chunk.shared = shares_words(table, c);
}

// From the arrays of one chunk to those of another with as many.
Distances between(const StepChunk& from, const StepChunk& to) {
    const auto bytes = [](const void* a, const void* b) {
        return int64_t(reinterpret_cast<intptr_t>(b) - reinterpret_cast<intptr_t>(a));
    };
    Distances found = {bytes(from.grad, to.grad), bytes(from.master, to.master), {}, bytes(from.model, to.model)};
    for (int k = 0; k < from.states; ++k) found.state[k] = bytes(from.state[k], to.state[k]);
    return found;
}

// Runs `step(chunk, part)` on all chunks and keeps the flags of what they wrote; `part` is the chunk in the table.
template <class Step>
void run(const StepLists& lists, int threads, Step&& step) {
    const Table& table = lists.table;
    const bool narrows = lists.models != nullptr;
    for (int32_t place : table.places) {
        if (!narrows) break;
        lists.overflow[size_t(place)] = 0;
    }
    const bool marks = narrows && lists.marks.memory != nullptr;
    const bool stream = table.elements * 2 >= kStepStreamingThreshold && !marks;
    for_chunks<uint32_t>(
        table, threads,
        [&](const Chunk& c) {
            StepChunk chunk = chunk_of(lists, c, stream);
            if (const Chunk* later = later_chunk(table, c)) chunk.ahead = between(chunk, chunk_of(lists, *later, stream));
            if (marks) mark_in(lists.marks, table, c, chunk);
            return step(chunk, c);
        },
        [&](size_t place, uint32_t flags) {
            if (narrows) lists.overflow[place] |= int32_t(flags);
        });
}

template <class Group>
std::vector<Group> groups_of(const std::string& packed) {
    require(packed.size() % sizeof(Group) == 0, "the groups are structs of another size");
    std::vector<Group> groups(packed.size() / sizeof(Group));
    if (!groups.empty()) memcpy(groups.data(), packed.data(), packed.size());
    return groups;
}

template <class Group>
GradFactors factors_of(const StepGiven& given, const Group& group) {
    return {given.inv_scale, group.maximize != 0 ? -given.coefficient : given.coefficient};
}

// Counts up, and by place the numbers of the step.
template <class F, class Group>
std::vector<typename F::Scalars> scalars_of(const StepLists& lists, const StepGiven& given, const std::vector<Group>& groups) {
    const size_t count = lists.table.numels.size();
    require(!F::counts || (given.steps != nullptr && given.steps->size() == count), "steps must have one entry for each tensor");
    std::vector<typename F::Scalars> scalars(count);
    const typename F::Scalars* last = nullptr;
    int32_t last_group = -1;
    float last_number = 0.0f;
    for (int32_t place : lists.table.places) {
        const size_t i = size_t(place);
        const float number = F::counts ? *static_cast<float*>((*given.steps)[i]) += 1.0f : 0.0f;
        if (last != nullptr && last_group == lists.group_of[i] && last_number == number) {
            scalars[i] = *last;
        } else {
            const Group& group = groups[size_t(lists.group_of[i])];
            scalars[i] = F::scalars(group, group.lr.value, double(number));
        }
        last = &scalars[i];
        last_group = lists.group_of[i];
        last_number = number;
    }
    return scalars;
}

enum Place {
#define FP16OPT_PLACE(F) kPlaceOf##F,
    FP16OPT_FORMULAS(FP16OPT_PLACE)
#undef FP16OPT_PLACE
};

template <class F, Place kPlace>
void step_by(const StepLists& lists, const StepGiven& given) {
    const auto groups = groups_of<typename F::Group>(given.groups);
    require_lists(lists, groups.size());
    const int states = int(lists.state.size());
    require(states >= F::least_states && states <= F::most_states, "these are not as many lists of state as the formula has");
    require(!F::fills_first || given.first.size() == lists.table.numels.size(), "first must have one entry for each tensor");
    const auto scalars = scalars_of<F>(lists, given, groups);
    const StepOfChunk step = current_level().steps->steps[kPlace];
    run(lists, given.threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const bool first = F::fills_first && given.first[place] != 0;
        return step(chunk, factors_of(given, groups[size_t(lists.group_of[place])]), &scalars[place], first);
    });
}

State8Chunk codes_of(const StepLists& lists, const StepGiven& given, const Chunk& part, float limit) {
    float* scales = static_cast<float*>((*given.scales)[size_t(part.tensor)]) + part.block;
    return {scales, limit, dither_at(part.index, lists.number)};
}

void require_scales(const StepLists& lists, const StepGiven& given) {
    require(given.scales != nullptr && given.scales->size() == lists.table.numels.size(), "scales must have one entry for each tensor");
}

static_assert(kChunk % kStateBlock == 0 && kScaled == kStateBlock, "chunks begin where blocks do");

void adam8(const StepLists& lists, const StepGiven& given) {
    const auto groups = groups_of<Adam8Group>(given.groups);
    require_lists(lists, groups.size(), DType::byte);
    require_scales(lists, given);
    require(lists.state.size() == 2, "Adam's 8-bit state is two lists");
    const auto scalars = scalars_of<Adam>(lists, given, groups);
    const auto* level = current_level().state8;
    run(lists, given.threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const Adam8Group& group = groups[size_t(lists.group_of[place])];
        return level->adam(chunk, codes_of(lists, given, part, group.limit), factors_of(given, group), &scalars[place]);
    });
}

void sgd8(const StepLists& lists, const StepGiven& given) {
    const auto groups = groups_of<SgdGroup>(given.groups);
    require_lists(lists, groups.size(), DType::byte);
    require(given.first.size() == lists.table.numels.size(), "first must have one entry for each tensor");
    require_scales(lists, given);
    require(lists.state.size() == 1, "SGD's 8-bit state is one list");
    const auto scalars = scalars_of<Sgd>(lists, given, groups);
    const auto* level = current_level().state8;
    run(lists, given.threads, [&](const StepChunk& chunk, const Chunk& part) {
        const size_t place = size_t(part.tensor);
        const SgdGroup& group = groups[size_t(lists.group_of[place])];
        return level->sgd(chunk, codes_of(lists, given, part, 1.0f), factors_of(given, group), &scalars[place],
                          given.first[place] != 0);
    });
}

#define FP16OPT_NAMED(F) {#F, F::counts, false, &step_by<F, kPlaceOf##F>},
constexpr StepFormula kFormulas[] = {
    FP16OPT_FORMULAS(FP16OPT_NAMED){"Adam8", true, true, &adam8},
    {"Sgd8", false, true, &sgd8},
};
#undef FP16OPT_NAMED

}  // namespace

const StepFormula& formula_named(const std::string& name) {
    for (const StepFormula& formula : kFormulas) {
        if (name == formula.name) return formula;
    }
    throw std::invalid_argument("the compiled module has no formula '" + name + "'. Build it anew.");
}

}  // namespace fp16opt

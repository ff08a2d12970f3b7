// Lists of tensors as the GPU's kernels read them. Host code only.
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "../launch/cuda_layout.h"

namespace fp16opt {
namespace {

void demand(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(what);
}

void check_places(const std::vector<int64_t>& numels, const std::vector<int64_t>& rows,
                  const std::vector<int32_t>& places) {
    demand(rows.size() == numels.size(), "rows must have one entry for each tensor");
    for (int32_t place : places) {
        demand(place >= 0 && size_t(place) < numels.size(), "a place lies outside the lists");
        demand(numels[size_t(place)] >= 0 && rows[size_t(place)] >= 0, "a size or row is negative");
    }
}

}  // namespace

CudaTable::CudaTable(const std::vector<int64_t>& numels, const std::vector<int64_t>& rows,
                     const std::vector<std::vector<DType>>& dtypes, const std::vector<int32_t>& places)
    : lists_(int(dtypes.size())), length_(numels.size()) {
    check_places(numels, rows, places);
    demand(lists_ >= 1 && lists_ <= kMostLists, "an operation has one to six lists");
    for (const auto& list : dtypes) demand(list.size() == numels.size(), "dtypes must have one entry for each tensor");
    for (int32_t place : places) {
        Item item{numels[size_t(place)], rows[size_t(place)], place, {}};
        for (size_t list = 0; list < dtypes.size(); ++list) {
            const DType dtype = dtypes[list][size_t(place)];
            demand(dtype >= DType::half && dtype <= DType::wide, "unknown dtype code");
            item.dtypes[list] = int8_t(dtype);
        }
        entries_.push_back(item);
    }
    std::vector<int64_t> counts;
    for (const Item& item : entries_) counts.push_back(item.numel);
    std::vector<int32_t> all(entries_.size());
    std::iota(all.begin(), all.end(), 0);
    chunks_ = pack(counts, all);
    first_chunk_.assign(1, 0);
    for (int64_t numel : counts) first_chunk_.push_back(first_chunk_.back() + (numel + kChunk - 1) / kChunk);
}

int32_t CudaTable::filled() const {
    int32_t count = 0;
    for (const Item& item : entries_) count += item.numel > 0;
    return count;
}

bool CudaTable::point(const std::vector<Pointers>& lists, const std::vector<uint8_t>& add) {
    demand(lists.size() == size_t(lists_), "the table was made for another number of lists");
    for (const Pointers& list : lists) demand(list.size() == length_, "the list does not have the table's length");
    demand(add.empty() || add.size() == length_, "there must be one flag for each tensor");
    std::vector<void*> pointers;
    pointers.reserve(entries_.size() * lists.size());
    for (const Pointers& list : lists) {
        for (const Item& item : entries_) pointers.push_back(list[size_t(item.place)]);
    }
    std::vector<uint8_t> flags;
    for (const Item& item : entries_) flags.push_back(!add.empty() ? add[size_t(item.place)] : 0);
    if (pointers == pointers_ && flags == add_) return false;
    pointers_ = std::move(pointers);
    add_ = std::move(flags);
    return true;
}

int64_t CudaTable::changing_bytes() const { return Layout(lists_, entries(), chunk_count()).chunks; }
int64_t CudaTable::copied_bytes() const { return Layout(lists_, entries(), chunk_count()).partial; }
int64_t CudaTable::all_bytes() const { return Layout(lists_, entries(), chunk_count()).end; }

void CudaTable::fill(void* host, bool both) const {
    const Layout at(lists_, entries(), chunk_count());
    char* base = static_cast<char*>(host);
    std::memset(base, 0, size_t(both ? at.partial : at.chunks));
    if (!pointers_.empty()) std::memcpy(base + at.pointers, pointers_.data(), pointers_.size() * sizeof(void*));
    if (!add_.empty()) std::memcpy(base + at.add, add_.data(), add_.size());
    if (!both) return;
    if (!chunks_.empty()) std::memcpy(base + at.chunks, chunks_.data(), chunks_.size() * sizeof(Chunk));
    for (size_t i = 0; i <= entries_.size(); ++i) {
        Entry entry{};
        entry.first_chunk = first_chunk_[i];
        if (i < entries_.size()) {
            const Item& item = entries_[i];
            entry.row = item.row;
            std::memcpy(entry.dtypes, item.dtypes, sizeof(item.dtypes));
            entry.stride = item.numel <= kSampledWhole ? 0 : sample_stride(item.numel);
        }
        std::memcpy(base + at.table + int64_t(i * sizeof(Entry)), &entry, sizeof(Entry));
    }
}

void CudaTable::require(int lists, int64_t n) const {
    demand(lists_ == lists, "the table was made for another number of lists");
    for (const Item& item : entries_) demand(item.row < n, "a row lies outside the statistics");
}

void CudaTable::require_dtypes(int list, std::initializer_list<DType> allowed) const {
    for (const Item& item : entries_) {
        bool found = false;
        for (DType dtype : allowed) found |= item.dtypes[list] == int8_t(dtype);
        demand(found, "a tensor has a dtype that the operation does not take");
    }
}

}  // namespace fp16opt

// Lists of tensors as the GPU's kernels read them. Host code only.
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

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
    : lists_(int(dtypes.size())), lengths_(dtypes.size(), numels.size()) {
    check_places(numels, rows, places);
    demand(lists_ >= 1 && lists_ <= kMostLists, "an operation has one to six lists");
    for (const auto& list : dtypes) demand(list.size() == numels.size(), "dtypes must have one entry for each tensor");
    for (int32_t place : places) {
        Item item{numels[size_t(place)], rows[size_t(place)], place, -1, {}};
        for (size_t list = 0; list < dtypes.size(); ++list) {
            const DType dtype = dtypes[list][size_t(place)];
            demand(dtype >= DType::half && dtype <= DType::wide, "unknown dtype code");
            item.dtypes[list] = int8_t(dtype);
        }
        entries_.push_back(item);
    }
    pack_entries();
}

void CudaTable::watch(const std::vector<int64_t>& numels, const std::vector<int64_t>& rows,
                      const std::vector<int32_t>& places) {
    check_places(numels, rows, places);
    demand(!watches_ && lists_ < kMostLists, "the table watches tensors already, or has no room for them");
    std::unordered_map<int64_t, size_t> entry_of_row;
    for (size_t i = 0; i < entries_.size(); ++i) {
        if (entries_[i].dtypes[0] != int8_t(DType::wide)) entry_of_row[entries_[i].row] = i;
    }
    for (int32_t place : places) {
        const int64_t numel = numels[size_t(place)], row = rows[size_t(place)];
        const auto found = entry_of_row.find(row);
        if (found != entry_of_row.end() && entries_[found->second].numel == numel) {
            entries_[found->second].watched_place = place;
        } else {
            entries_.push_back({numel, row, -1, place, {}});
        }
    }
    watches_ = true;
    lists_ += 1;
    lengths_.push_back(numels.size());
    pack_entries();
}

void CudaTable::pack_entries() {
    std::vector<int64_t> numels;
    for (const Item& item : entries_) numels.push_back(item.numel);
    std::vector<int32_t> all(entries_.size());
    std::iota(all.begin(), all.end(), 0);
    chunks_ = pack(numels, all);
    first_chunk_.assign(1, 0);
    for (int64_t numel : numels) first_chunk_.push_back(first_chunk_.back() + (numel + kChunk - 1) / kChunk);
    pointers_.clear();
    add_.clear();
}

int32_t CudaTable::filled() const {
    int32_t count = 0;
    for (const Item& item : entries_) count += item.numel > 0;
    return count;
}

bool CudaTable::point(const std::vector<Pointers>& lists, const std::vector<uint8_t>& add) {
    const bool as_before = watches_ && lists.size() + 1 == size_t(lists_) && !pointers_.empty();
    demand(as_before || lists.size() == size_t(lists_), "the table was made for another number of lists");
    for (size_t list = 0; list < lists.size(); ++list) {
        demand(lists[list].size() == lengths_[list], "the list does not have the table's length");
    }
    demand(add.empty() || add.size() == lengths_[0], "there must be one flag for each tensor");
    std::vector<void*> pointers;
    pointers.reserve(entries_.size() * lists.size());
    for (size_t list = 0; list < lists.size(); ++list) {
        const bool watched = watches_ && int(list) == lists_ - 1;
        for (const Item& item : entries_) {
            const int32_t place = watched ? item.watched_place : item.place;
            pointers.push_back(place < 0 ? nullptr : lists[list][size_t(place)]);
        }
    }
    if (as_before) pointers.insert(pointers.end(), pointers_.end() - int64_t(entries_.size()), pointers_.end());
    std::vector<uint8_t> flags;
    for (const Item& item : entries_) flags.push_back(!add.empty() && item.place >= 0 ? add[size_t(item.place)] : 0);
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
            entry.served = item.place >= 0;
            entry.watched = item.watched_place >= 0;
        }
        std::memcpy(base + at.table + int64_t(i * sizeof(Entry)), &entry, sizeof(Entry));
    }
}

void CudaTable::require(int lists, int64_t n) const {
    demand(lists_ == lists + int(watches_), "the table was made for another number of lists");
    for (const Item& item : entries_) demand(item.row < n, "a row lies outside the statistics");
}

void CudaTable::require_dtypes(int list, std::initializer_list<DType> allowed) const {
    for (const Item& item : entries_) {
        bool found = item.place < 0;
        for (DType dtype : allowed) found |= item.dtypes[list] == int8_t(dtype);
        demand(found, "a tensor has a dtype that the operation does not take");
    }
}

}  // namespace fp16opt

#include "rope.h"

#include <cmath>

namespace qp {

void RopeTable::prepare(const int64_t* positions, int num_positions) {
    for (int i = 0; i < num_positions; ++i) {
        const int64_t page = positions[i] / kPage;
        if (page >= static_cast<int64_t>(pages_.size())) pages_.resize(page + 1);
        if (pages_[page].empty()) fill(page);
    }
}

void RopeTable::fill(int64_t page) {
    const int pairs = num_pairs();
    std::vector<float> table(kPage * 2 * pairs);
    for (int64_t row = 0; row < kPage; ++row) {
        float* cos_sin = table.data() + row * 2 * pairs;
        for (int pair = 0; pair < pairs; ++pair) {
            // The angle is rounded to float32, as the models that are served were trained with.
            const float angle = static_cast<float>(page * kPage + row) * inverse_frequencies_[pair];
            cos_sin[pair] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale_;
            cos_sin[pairs + pair] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale_;
        }
    }
    pages_[page] = std::move(table);
}

int64_t RopeTable::num_bytes() const {
    int64_t floats = static_cast<int64_t>(inverse_frequencies_.size());
    for (const auto& page : pages_) floats += static_cast<int64_t>(page.size());
    return floats * 4;
}

}  // namespace qp

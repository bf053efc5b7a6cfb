#include "rope.h"

#include <algorithm>
#include <cmath>

namespace qp {

void RopeTable::look_up(const std::vector<int64_t>& positions, RopeRows& rows) {
    const int64_t width = 2 * num_pairs();
    const auto num_far = std::count_if(positions.begin(), positions.end(), [](int64_t p) { return p >= kKept; });
    rows.rows_.resize(positions.size());
    rows.far_.resize(num_far * width);
    float* far = rows.far_.data();
    for (size_t t = 0; t < positions.size(); ++t) {
        if (positions[t] < kKept) {
            rows.rows_[t] = kept(positions[t]);
            continue;
        }
        turn(positions[t], far);
        rows.rows_[t] = far;
        far += width;
    }
}

// In float64: a text without end turns far, and distances between far positions must stay what they are.
void RopeTable::turn(int64_t position, float* cos_sin) const {
    const int pairs = num_pairs();
    for (int pair = 0; pair < pairs; ++pair) {
        const double angle = static_cast<double>(position) * inverse_frequencies_[pair];
        cos_sin[pair] = static_cast<float>(std::cos(angle)) * scale_;
        cos_sin[pairs + pair] = static_cast<float>(std::sin(angle)) * scale_;
    }
}

const float* RopeTable::kept(int64_t position) {
    const int64_t width = 2 * num_pairs();
    std::vector<float>& page = pages_[position / kPage];
    if (page.empty()) {
        page.resize(kPage * width);
        for (int64_t row = 0; row < kPage; ++row) turn(position / kPage * kPage + row, page.data() + row * width);
    }
    return page.data() + position % kPage * width;
}

int64_t RopeTable::num_bytes() const {
    int64_t total = static_cast<int64_t>(inverse_frequencies_.size()) * 8;
    for (const auto& page : pages_) total += static_cast<int64_t>(page.size()) * 4;
    return total;
}

}  // namespace qp

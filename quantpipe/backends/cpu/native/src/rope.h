// Rotary position embedding: cosines and sines by position, made when a position is first met.
//
// Shapes: P pairs of dimensions that turn.
#pragma once

#include <cstdint>
#include <vector>

namespace qp {

class RopeTable {
   public:
    RopeTable(int num_pairs, const float* inverse_frequencies, float attention_scale)
        : inverse_frequencies_(inverse_frequencies, inverse_frequencies + num_pairs), scale_(attention_scale) {}

    int num_pairs() const { return static_cast<int>(inverse_frequencies_.size()); }
    // Makes what is missing for these positions; not while others read.
    void prepare(const int64_t* positions, int num_positions);
    // Cosines [P], then sines [P], both times the scale; of a position that was prepared.
    const float* at(int64_t position) const {
        return pages_[position / kPage].data() + position % kPage * 2 * num_pairs();
    }
    int64_t num_bytes() const;

   private:
    static constexpr int64_t kPage = 256;

    void fill(int64_t page);

    std::vector<float> inverse_frequencies_;
    float scale_;
    std::vector<std::vector<float>> pages_;   // of kPage positions each, empty until needed
};

}  // namespace qp

// Rotary position embedding: cosines and sines by position.
//
// Shapes: T tokens of a step, P pairs of dimensions that turn.
#pragma once

#include <cstdint>
#include <vector>

namespace qp {

// Of each token of a step: cosines [P], then sines [P], both times the attention scale.
class RopeRows {
   public:
    const float* operator[](int64_t token) const { return rows_[token]; }
    int64_t num_bytes() const { return static_cast<int64_t>(far_.size() * 4 + rows_.size() * sizeof(float*)); }

   private:
    friend class RopeTable;
    std::vector<const float*> rows_;
    std::vector<float> far_;   // of positions that the table does not keep
};

class RopeTable {
   public:
    RopeTable(int num_pairs, const double* inverse_frequencies, float attention_scale)
        : inverse_frequencies_(inverse_frequencies, inverse_frequencies + num_pairs),
          scale_(attention_scale),
          pages_(kKept / kPage) {}

    int num_pairs() const { return static_cast<int>(inverse_frequencies_.size()); }
    // Fills rows; they hold until the next look-up into them.
    void look_up(const std::vector<int64_t>& positions, RopeRows& rows);
    int64_t num_bytes() const;

   private:
    // Positions below this are computed once, the others, of which there is no end, at every step.
    static constexpr int64_t kKept = 1 << 15;
    static constexpr int64_t kPage = 256;

    void turn(int64_t position, float* cos_sin) const;
    const float* kept(int64_t position);

    std::vector<double> inverse_frequencies_;
    float scale_;
    std::vector<std::vector<float>> pages_;   // of kPage positions each, empty until needed
};

}  // namespace qp

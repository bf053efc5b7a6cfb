// Packed weights, word by word: what the dot products of one instruction set take, out of each 32-bit lane.
//
// A word holds the codes of one output channel for kWordK neighbouring inputs; it is used in kSteps steps, each against
// kStepBytes of activations.
#pragma once

#include "linear_kernels.h"

#define QP_STEP static inline __attribute__((always_inline)) I

namespace qp {
namespace {

// Expanded before, or stored as they are used.
template <class V>
struct Floats {
    using I = typename V::I;
    static constexpr int kWordK = 1, kSteps = 1;
    QP_STEP step(I word, int) { return word; }
};

template <class V>
struct Bf16Pairs {
    using I = typename V::I;
    static constexpr int kWordK = 2, kSteps = 2;
    QP_STEP step(I word, int s) {
        return s == 0 ? V::template shift_left<16>(word) : V::iand(word, V::iset(static_cast<int32_t>(0xffff0000)));
    }
};

template <class V>
struct WidePairs {
    using I = typename V::I;
    static constexpr int kWordK = 2, kSteps = 1;
    static constexpr bool kIsNibbles = false, kIsPairs = true;
    QP_STEP step(I word, int) { return word; }
};

template <class V>
struct BytePairs {
    using I = typename V::I;
    static constexpr int kWordK = 4, kSteps = 2;
    static constexpr bool kIsNibbles = false, kIsPairs = true;
    QP_STEP step(I word, int s) {
        return s == 0 ? V::iand(word, V::iset(0x00ff00ff)) : V::template shift_right_16<8>(word);
    }
};

template <class V>
struct NibblePairs {
    using I = typename V::I;
    static constexpr int kWordK = 8, kSteps = 4;
    static constexpr bool kIsNibbles = true, kIsPairs = true;
    QP_STEP step(I word, int s) {
        const I mask = V::iset(0x000f000f);
        switch (s) {
            case 0: return V::iand(word, mask);
            case 1: return V::iand(V::template shift_right_16<8>(word), mask);
            case 2: return V::iand(V::template shift_right_16<4>(word), mask);
            default: return V::template shift_right_16<12>(word);
        }
    }
};

template <class V, bool IsNibbles>
struct Quads {
    using I = typename V::I;
    static constexpr int kWordK = 4, kSteps = 1;
    static constexpr bool kIsNibbles = IsNibbles, kIsPairs = false;
    QP_STEP step(I word, int) { return word; }
};

template <class V>
struct NibbleQuads {
    using I = typename V::I;
    static constexpr int kWordK = 8, kSteps = 2;
    static constexpr bool kIsNibbles = true, kIsPairs = false;
    QP_STEP step(I word, int s) {
        const I mask = V::iset(0x0f0f0f0f);
        return V::iand(s == 0 ? word : V::template shift_right_16<4>(word), mask);
    }
};

}  // namespace
}  // namespace qp

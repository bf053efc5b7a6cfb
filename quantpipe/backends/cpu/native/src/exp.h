// exp(x) in float32, for vectors.
#pragma once

namespace qp {
namespace {

// Within 2 units in the last place; 0 where the result would be denormal, infinity from about 88.4 on, NaN for a NaN.
// x = n * ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r that is the best one for float32 (degree 6).
template <class S>
inline typename S::F exp_of(typename S::F x) {
    using F = typename S::F;
    // max and min give their second argument where either is a NaN.
    const F bounded = S::min(S::set(89.0f), S::max(S::set(-88.0f), x));
    const typename S::I n = S::round(S::mul(bounded, S::set(1.44269504f)));
    const F whole = S::to_float(n);
    F r = S::fma(whole, S::set(-0.693359375f), bounded);
    r = S::fma(whole, S::set(2.12194440e-4f), r);
    F y = S::fma(S::set(1.98756915e-4f), r, S::set(1.39819995e-3f));
    y = S::fma(y, r, S::set(8.33345191e-3f));
    y = S::fma(y, r, S::set(4.16657959e-2f));
    y = S::fma(y, r, S::set(1.66666655e-1f));
    y = S::fma(y, r, S::set(5.00000012e-1f));
    y = S::add(S::fma(S::mul(r, r), y, r), S::set(1.0f));
    // n = -127 gives 0, n = 128 infinity.
    return S::mul(y, S::as_float(S::template shift_left<23>(S::iadd(n, S::iset(127)))));
}

}  // namespace
}  // namespace qp

// SPDX-License-Identifier: Apache-2.0
// The NEON kernels of 64-bit ARM: vector types and operations for the templates.
#include "internal.h"

#if OFL_OPTIM_HAS_NEON
#include <arm_neon.h>

#define OFL_TARGET  /* part of every such core */
#define OFL_WIDTH   4
#define OFL_VARIANT ofl_optim_neon
#define OP	    static inline __attribute__((always_inline))

typedef float32x4_t vf;
typedef int32x4_t vi;
typedef float64x2_t vd;
typedef float32x2_t hf;

/* A table: one operation a line. */
// clang-format off
OP vf vf_load(const float *at) { return vld1q_f32(at); }
OP void vf_store(float *at, vf x) { vst1q_f32(at, x); }
OP vf vf_set1(float x) { return vdupq_n_f32(x); }
OP vf vf_add(vf x, vf y) { return vaddq_f32(x, y); }
OP vf vf_sub(vf x, vf y) { return vsubq_f32(x, y); }
OP vf vf_mul(vf x, vf y) { return vmulq_f32(x, y); }
OP vf vf_div(vf x, vf y) { return vdivq_f32(x, y); }
OP vf vf_sqrt(vf x) { return vsqrtq_f32(x); }
OP vi vi_add(vi x, vi y) { return vaddq_s32(x, y); }
OP vi vi_set1(int x) { return vdupq_n_s32(x); }
OP vi vi_and(vi x, vi y) { return vandq_s32(x, y); }
OP vi vi_shift_right_16(vi x) { return vshrq_n_s32(x, 16); }
OP vf vi_as_vf(vi x) { return vreinterpretq_f32_s32(x); }
OP vi vf_as_vi(vf x) { return vreinterpretq_s32_f32(x); }
OP vd vd_zero(void) { return vdupq_n_f64(0.0); }
OP vd vd_add_square(vd sum, vd x) { return vfmaq_f64(sum, x, x); }
OP void vd_store(double *at, vd x) { vst1q_f64(at, x); }
OP vd vd_from(hf x) { return vcvt_f64_f32(x); }
OP hf hf_set1(float x) { return vdup_n_f32(x); }
OP hf hf_mul(hf x, hf y) { return vmul_f32(x, y); }
OP hf hf_load_f32(const float *at) { return vld1_f32(at); }
OP void prefetch_line(const void *at) { __builtin_prefetch(at); }
OP void store_fence(void) {}
// clang-format on

/* Two 16-bit values, in the lower half of a vector of four. */
OP uint16x4_t load_two(const void *at)
{
	uint32_t bits;

	memcpy(&bits, at, sizeof(bits));
	return vreinterpret_u16_u32(vdup_n_u32(bits));
}

/* 4 bf16: those of even and of odd index. */
OP void hf_load_bf16_pairs(const void *at, hf *even, hf *odd)
{
	const uint32x2_t x = vreinterpret_u32_u16(vld1_u16(at));

	*even = vreinterpret_f32_u32(vshl_n_u32(x, 16));
	*odd = vreinterpret_f32_u32(vand_u32(x, vdup_n_u32(0xffff0000u)));
}

OP hf hf_load_f16(const void *at)
{
	return vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u16(load_two(at))));
}

/* NaN becomes the one NaN. */
OP vf vf_canonical(vf x)
{
	return vbslq_f32(vceqq_f32(x, x), x, vi_as_vf(vi_set1(OFL_OPTIM_NAN)));
}

/* Whether one of all lanes is NaN. */
OP int vf_any_nan(vf x, vf y)
{
	return vminvq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))) == 0;
}

/* 1, -1 or 0; 0 for NaN. */
OP vf vf_sign(vf x)
{
	const vf zero = vf_set1(0.0f);
	const vf sign = vbslq_f32(vcgtq_f32(x, zero), vf_set1(1.0f), zero);

	return vbslq_f32(vcltq_f32(x, zero), vf_set1(-1.0f), sign);
}

/* 8 16-bit values into the upper halves of 32-bit ones, in order. */
OP void widen_high(const void *at, vi out[2])
{
	const int16x8_t x = vld1q_s16(at);

	out[0] = vshll_n_s16(vget_low_s16(x), 16);
	out[1] = vshll_high_n_s16(x, 16);
}

/* 8 signed 16-bit values into 32-bit ones, in order. */
OP void widen_signed(const void *at, vi out[2])
{
	const int16x8_t x = vld1q_s16(at);

	out[0] = vmovl_s16(vget_low_s16(x));
	out[1] = vmovl_high_s16(x);
}

OP void load_f16(const void *at, vf out[2])
{
	const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(at));

	out[0] = vcvt_f32_f16(vget_low_f16(x));
	out[1] = vcvt_high_f32_f16(x);
}

/* To nearest even. */
OP vi pack_f16(vf x, vf y)
{
	return vreinterpretq_s32_f16(vcvt_high_f16_f32(vcvt_f16_f32(x), y));
}

/* The lower, or upper, 16 bits of 8 32-bit values, in order. */
OP vi pack_low(vi x, vi y)
{
	return vreinterpretq_s32_s16(
		vuzp1q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
}

OP vi pack_high(vi x, vi y)
{
	return vreinterpretq_s32_s16(
		vuzp2q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
}

/* There is no streaming store of one vector: an ordinary one. */
OP void store_16(void *at, vi x, int is_streamed)
{
	(void)is_streamed;
	vst1q_s16(at, vreinterpretq_s16_s32(x));
}

#include "update_template.h"

#include "gradient_template.h"
#else
typedef int ofl_optim_not_empty;
#endif

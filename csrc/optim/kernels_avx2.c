// SPDX-License-Identifier: Apache-2.0
// The AVX2 kernels: vector types and operations for kernels_template.h; the streaming
// copy.
#include "internal.h"

#if OFL_OPTIM_HAS_X86
#include <immintrin.h>

/* Without fma: the compiler has no instruction to fuse with. */
#define OFL_TARGET     __attribute__((target("avx2")))
#define OFL_WIDTH      8
#define OFL_NAME(name) name##_avx2
#define OP	       static inline __attribute__((always_inline)) OFL_TARGET

typedef __m256 vf;
typedef __m256i vi;
typedef __m256d vd;

/* A table: one operation a line. */
// clang-format off
OP vf vf_load(const float *at) { return _mm256_loadu_ps(at); }
OP void vf_store(float *at, vf x) { _mm256_storeu_ps(at, x); }
OP vf vf_set1(float x) { return _mm256_set1_ps(x); }
OP vf vf_add(vf x, vf y) { return _mm256_add_ps(x, y); }
OP vf vf_sub(vf x, vf y) { return _mm256_sub_ps(x, y); }
OP vf vf_mul(vf x, vf y) { return _mm256_mul_ps(x, y); }
OP vf vf_div(vf x, vf y) { return _mm256_div_ps(x, y); }
OP vf vf_sqrt(vf x) { return _mm256_sqrt_ps(x); }
OP vi vi_add(vi x, vi y) { return _mm256_add_epi32(x, y); }
OP vi vi_set1(int x) { return _mm256_set1_epi32(x); }
OP vf vi_as_vf(vi x) { return _mm256_castsi256_ps(x); }
OP vi vf_as_vi(vf x) { return _mm256_castps_si256(x); }
OP vd vd_zero(void) { return _mm256_setzero_pd(); }
OP vd vd_add(vd x, vd y) { return _mm256_add_pd(x, y); }
OP vd vd_mul(vd x, vd y) { return _mm256_mul_pd(x, y); }
OP void vd_store(double *at, vd x) { _mm256_storeu_pd(at, x); }
OP vd vd_from_low(vf x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
OP vd vd_from_high(vf x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
// clang-format on

/* NaN becomes the one NaN. */
OP vf vf_canonical(vf x)
{
	return _mm256_blendv_ps(x, vi_as_vf(vi_set1(OFL_OPTIM_NAN)),
				_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* 16 16-bit values into the upper halves of 32-bit ones, in order. */
OP void widen_high(const void *at, vi out[2])
{
	vi x = _mm256_loadu_si256(at);

	out[0] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16);
	out[1] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)),
				   16);
}

/* 16 signed 16-bit values into 32-bit ones, in order. */
OP void widen_signed(const void *at, vi out[2])
{
	vi x = _mm256_loadu_si256(at);

	out[0] = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(x));
	out[1] = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1));
}

/* packus works within 128-bit halves: put its quarters in order. */
OP vi pack_words(vi x, vi y)
{
	return _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8);
}

/* The lower, or upper, 16 bits of 16 32-bit values, in order. */
OP vi pack_low(vi x, vi y)
{
	const vi mask = vi_set1(0xffff);

	return pack_words(_mm256_and_si256(x, mask), _mm256_and_si256(y, mask));
}

OP vi pack_high(vi x, vi y)
{
	return pack_words(_mm256_srli_epi32(x, 16), _mm256_srli_epi32(y, 16));
}

OP void store_16(void *at, vi x, int is_streamed)
{
	if (is_streamed)
		_mm256_stream_si256(at, x);
	else
		_mm256_storeu_si256(at, x);
}

#include "kernels_template.h"

OFL_TARGET void ofl_optim_copy_avx2(unsigned char *dst, const unsigned char *src,
				    size_t num_bytes)
{
	size_t i = 0;

	for (; num_bytes - i >= 64; i += 64) {
		_mm256_stream_si256((void *)(dst + i),
				    _mm256_loadu_si256((const void *)(src + i)));
		_mm256_stream_si256((void *)(dst + i + 32),
				    _mm256_loadu_si256((const void *)(src + i + 32)));
	}
	memcpy(dst + i, src + i, num_bytes - i);
	_mm_sfence();
}
#else
typedef int ofl_optim_not_empty;
#endif

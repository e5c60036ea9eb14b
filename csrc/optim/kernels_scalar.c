// SPDX-License-Identifier: Apache-2.0
// The reference kernels: docs/numerics.md written down once, one element at a time.
#include "internal.h"

#include <math.h>

static float canonical(float value)
{
	return isnan(value) ? ofl_bits_to_float(OFL_OPTIM_NAN) : value;
}

static float load_master(const struct ofl_optim_adamw *o, size_t i)
{
	uint32_t high;

	switch (o->codec) {
	case OFL_OPTIM_SPLIT:
		high = (uint32_t)((const uint16_t *)o->parameter)[i] << 16;
		return ofl_bits_to_float(
			high + (uint32_t)(int32_t)((const int16_t *)o->master)[i]);
	case OFL_OPTIM_FP32:
		return ((const float *)o->master)[i];
	default:
		return ((const float *)o->parameter)[i];
	}
}

/* Master to bf16: ties away from zero in bit space; the rest is master_low. */
static void store_master(const struct ofl_optim_adamw *o, size_t i, float master)
{
	uint32_t bits = ofl_float_to_bits(master);
	uint16_t high = (uint16_t)((bits + 0x8000u) >> 16);

	switch (o->codec) {
	case OFL_OPTIM_SPLIT:
		((uint16_t *)o->parameter)[i] = high;
		((int16_t *)o->master)[i] = (int16_t)(uint16_t)bits;
		break;
	case OFL_OPTIM_FP32:
		((uint16_t *)o->parameter)[i] = high;
		((float *)o->master)[i] = master;
		break;
	default:
		((float *)o->parameter)[i] = master;
	}
}

void ofl_optim_adamw_scalar(const struct ofl_optim_adamw *o,
			    const struct ofl_optim_adamw_scalars *k, size_t start,
			    size_t stop)
{
	for (size_t i = start; i < stop; i++) {
		float p = load_master(o, i);
		float m = o->exp_avg[i];
		float v = o->exp_avg_sq[i];
		float g = ofl_load_gradient(o->gradient, o->gradient_dtype, i, o->scales);
		float s, x, y, d, n;

		p = p * k->q;
		s = g - m;
		if (k->c1 < 0.5f) {
			s = k->c1 * s;
			m = m + s;
		} else {
			s = s * (1.0f - k->c1);
			m = g - s;
		}
		x = k->b2 * v;
		y = k->c2 * g;
		y = y * g;
		v = x + y;
		d = sqrtf(v);
		d = d * k->r;
		d = d + k->e;
		n = k->u * m;
		n = n / d;
		p = p + n;
		o->exp_avg[i] = canonical(m);
		o->exp_avg_sq[i] = canonical(v);
		store_master(o, i, canonical(p));
	}
}

double ofl_optim_norm_scalar(const void *gradient, int dtype, size_t num_elements,
			     const float scales[2])
{
	double lanes[OFL_OPTIM_NORM_LANES] = {0.0};

	for (size_t i = 0; i < num_elements; i++) {
		/* The square of a float64 made from fp32 is exact: 48 bits. */
		double g = (double)ofl_load_gradient(gradient, dtype, i, scales);

		lanes[i % OFL_OPTIM_NORM_LANES] += g * g;
	}
	return ofl_combine_lanes(lanes);
}

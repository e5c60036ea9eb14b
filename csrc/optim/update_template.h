// SPDX-License-Identifier: Apache-2.0
// The vector kernels of updates, written once: included by kernels_<instruction set>.c.
//
// The including file defines OFL_TARGET (the target attribute), OFL_WIDTH (floats of a
// vector), vector types vf (floats), vi (as many 32-bit integers), vd (half as many
// doubles) and the operations used below.  A step is 2 * OFL_WIDTH elements: one full
// vector of 16-bit values.

#define OFL_STEP   (2 * OFL_WIDTH)
#define OFL_INLINE static inline __attribute__((always_inline)) OFL_TARGET

/*
 * Elements ahead that a step asks for: about one memory latency.  Of 0, 64 .. 2048, on
 * two cores of an AMD EPYC, 128 and 256 gave the highest rates for every codec.  Beyond
 * the end of an array a prefetch does nothing.
 */
#define OFL_PREFETCH   256
#define OFL_CACHE_LINE 64

/* The forms of a master, as constants of a loop: codec and parameter dtype. */
enum form { FORM_SPLIT, FORM_FP32_BF16, FORM_FP32_F16, FORM_PARAMETER };

/* The scalars of a range, one per lane, and what does not change within a call. */
struct constants {
	vf b1, c1, b2, c2, q, w, u, r, e, a, k1, k2;
	/* [Note: one form of lerp] m + c1*s and g - s*(1-c1) are base + c*s with
	 * c = c1 or -(1-c1): negation is exact and x - y is x + (-y). */
	vf c;
	int base_is_gradient;
	int is_scaled; /* k1 or k2 is not 1 */
	int decays;    /* w != 0 */
	int is_nesterov;
};

/* One step's operands: at the pass's index, or in a copy of a partial step. */
struct pointers {
	void *parameter, *master;
	const void *gradient;
	float *first, *second;
};

OFL_INLINE int has_first(int rule)
{
	return rule != OFL_OPTIM_SGD && rule != OFL_OPTIM_ADAGRAD;
}

OFL_INLINE int has_second(int rule)
{
	return rule == OFL_OPTIM_ADAMW || rule == OFL_OPTIM_ADAM ||
	       rule == OFL_OPTIM_ADAGRAD;
}

OFL_INLINE size_t parameter_itemsize(enum form form)
{
	return form == FORM_PARAMETER ? sizeof(float) : sizeof(uint16_t);
}

OFL_INLINE size_t master_itemsize(enum form form)
{
	return form == FORM_SPLIT ? sizeof(int16_t) : sizeof(float);
}

OFL_INLINE void prefetch(const void *array, size_t itemsize)
{
	uintptr_t address = (uintptr_t)array + OFL_PREFETCH * itemsize;

	for (size_t i = 0; i < OFL_STEP * itemsize; i += OFL_CACHE_LINE)
		prefetch_line((const void *)(address + i));
}

OFL_INLINE void load_values(const void *array, int dtype, vf out[2])
{
	vi bits[2];

	if (dtype == OFL_OPTIM_BF16) {
		widen_high(array, bits);
		out[0] = vi_as_vf(bits[0]);
		out[1] = vi_as_vf(bits[1]);
	} else if (dtype == OFL_OPTIM_F16) {
		load_f16(array, out);
	} else {
		out[0] = vf_load((const float *)array);
		out[1] = vf_load((const float *)array + OFL_WIDTH);
	}
}

OFL_INLINE void load_master(const struct pointers *at, enum form form, vf out[2])
{
	vi high[2], low[2];

	if (form == FORM_SPLIT) {
		widen_high(at->parameter, high);
		widen_signed(at->master, low);
		out[0] = vi_as_vf(vi_add(high[0], low[0]));
		out[1] = vi_as_vf(vi_add(high[1], low[1]));
	} else {
		load_values(form == FORM_PARAMETER ? at->parameter : at->master,
			    OFL_OPTIM_F32, out);
	}
}

OFL_INLINE void store_master(const struct pointers *at, enum form form, int is_streamed,
			     const vf master[2])
{
	const vi half = vi_set1(0x8000);
	float *floats = form == FORM_PARAMETER ? at->parameter : at->master;
	vi bits[2] = {vf_as_vi(master[0]), vf_as_vi(master[1])};

	if (form == FORM_SPLIT) {
		store_16(at->master, pack_low(bits[0], bits[1]), 0);
	} else {
		vf_store(floats, master[0]);
		vf_store(floats + OFL_WIDTH, master[1]);
	}
	if (form == FORM_SPLIT || form == FORM_FP32_BF16)
		store_16(at->parameter,
			 pack_high(vi_add(bits[0], half), vi_add(bits[1], half)),
			 is_streamed && form == FORM_FP32_BF16);
	else if (form == FORM_FP32_F16)
		store_16(at->parameter, pack_f16(master[0], master[1]), is_streamed);
}

/* docs/numerics.md: in that order, nothing fused. */
OFL_INLINE void update_adam(const struct constants *k, int is_decoupled, vf g, vf *p,
			    vf *m, vf *v)
{
	vf s, x, y, d, n;

	if (is_decoupled)
		*p = vf_mul(*p, k->q);
	s = vf_mul(k->c, vf_sub(g, *m));
	*m = vf_add(k->base_is_gradient ? g : *m, s);
	x = vf_mul(k->b2, *v);
	y = vf_mul(k->c2, g);
	y = vf_mul(y, g);
	*v = vf_add(x, y);
	d = vf_mul(vf_sqrt(*v), k->r);
	d = vf_add(d, k->e);
	n = vf_div(vf_mul(k->u, *m), d);
	*p = vf_add(*p, n);
}

OFL_INLINE void update_lion(const struct constants *k, vf g, vf *p, vf *m)
{
	vf s = vf_add(vf_mul(k->b1, *m), vf_mul(k->c1, g));

	*p = vf_add(vf_mul(*p, k->q), vf_mul(k->u, vf_sign(s)));
	*m = vf_add(vf_mul(k->b2, *m), vf_mul(k->c2, g));
}

OFL_INLINE void update_momentum(const struct constants *k, vf g, vf *p, vf *m)
{
	vf n;

	*m = vf_add(vf_mul(k->b1, *m), vf_mul(k->c1, g));
	n = k->is_nesterov ? vf_add(g, vf_mul(k->b1, *m)) : *m;
	*p = vf_add(*p, vf_mul(k->u, n));
}

OFL_INLINE void update_adagrad(const struct constants *k, vf g, vf *p, vf *v)
{
	vf d;

	*v = vf_add(vf_add(*v, k->a), vf_mul(g, g));
	d = vf_add(vf_sqrt(*v), k->e);
	*p = vf_add(*p, vf_div(vf_mul(k->u, g), d));
}

OFL_INLINE void update(int rule, const struct constants *k, vf g, vf *p, vf *m, vf *v)
{
	/* A factor of 1 changes no bit, so that neither is left out alone. */
	if (k->is_scaled)
		g = vf_mul(vf_mul(g, k->k1), k->k2);
	if (rule != OFL_OPTIM_ADAMW && rule != OFL_OPTIM_LION && k->decays)
		g = vf_add(g, vf_mul(k->w, *p));
	if (rule == OFL_OPTIM_ADAMW || rule == OFL_OPTIM_ADAM)
		update_adam(k, rule == OFL_OPTIM_ADAMW, g, p, m, v);
	else if (rule == OFL_OPTIM_LION)
		update_lion(k, g, p, m);
	else if (rule == OFL_OPTIM_MOMENTUM)
		update_momentum(k, g, p, m);
	else if (rule == OFL_OPTIM_ADAGRAD)
		update_adagrad(k, g, p, v);
	else
		*p = vf_add(*p, vf_mul(k->u, g));
}

/*
 * [Note: NaN is looked for in the master] What is NaN in first or second makes the new
 * master NaN, so one comparison of two vectors of masters tells that nothing is; but for
 * Lion, where the sign of NaN is 0.
 */
OFL_INLINE int any_nan(int rule, const vf p[2], const vf m[2])
{
	return vf_any_nan(p[0], p[1]) ||
	       (rule == OFL_OPTIM_LION && vf_any_nan(m[0], m[1]));
}

OFL_INLINE void make_canonical(vf values[2])
{
	values[0] = vf_canonical(values[0]);
	values[1] = vf_canonical(values[1]);
}

OFL_INLINE void step(const struct constants *k, const struct pointers *at, int rule,
		     enum form form, int gradient_dtype, int is_streamed)
{
	vf p[2], g[2], m[2] = {vf_set1(0.0f), vf_set1(0.0f)}, v[2] = {m[0], m[0]};

	load_master(at, form, p);
	load_values(at->gradient, gradient_dtype, g);
	if (has_first(rule))
		load_values(at->first, OFL_OPTIM_F32, m);
	if (has_second(rule))
		load_values(at->second, OFL_OPTIM_F32, v);
	for (int i = 0; i < 2; i++)
		update(rule, k, g[i], &p[i], &m[i], &v[i]);
	if (__builtin_expect(any_nan(rule, p, m), 0)) {
		make_canonical(p);
		make_canonical(m);
		make_canonical(v);
	}
	for (int i = 0; i < 2; i++) {
		if (has_first(rule))
			vf_store(at->first + i * OFL_WIDTH, m[i]);
		if (has_second(rule))
			vf_store(at->second + i * OFL_WIDTH, v[i]);
	}
	store_master(at, form, is_streamed, p);
}

OFL_INLINE struct pointers pointers_at(const struct ofl_optim_operands *o, int rule,
				       enum form form, int gradient_dtype, size_t i)
{
	struct pointers at = {
		.parameter = (char *)o->parameter + i * parameter_itemsize(form),
		.gradient = (const char *)o->gradient + i * ofl_itemsize(gradient_dtype),
	};

	if (form != FORM_PARAMETER)
		at.master = (char *)o->master + i * master_itemsize(form);
	if (has_first(rule))
		at.first = o->first + i;
	if (has_second(rule))
		at.second = o->second + i;
	return at;
}

/*
 * Fewer than OFL_STEP elements: a whole step on copies.  The rest of a copy is 0.  Not
 * inlined, with the kind of pass as variables: it is the smallest part of the time.
 */
static __attribute__((noinline)) OFL_TARGET void
partial_step(const struct constants *k, const struct pointers *at, int rule,
	     enum form form, int gradient_dtype, size_t num_elements)
{
	float parameter[OFL_STEP] = {0}, master[OFL_STEP] = {0}, gradient[OFL_STEP] = {0};
	float first[OFL_STEP] = {0}, second[OFL_STEP] = {0};
	const struct pointers copy = {parameter, master, gradient, first, second};
	const size_t parameter_bytes = num_elements * parameter_itemsize(form);
	const size_t master_bytes = num_elements * master_itemsize(form);
	const size_t state_bytes = num_elements * sizeof(float);

	memcpy(parameter, at->parameter, parameter_bytes);
	if (form != FORM_PARAMETER)
		memcpy(master, at->master, master_bytes);
	memcpy(gradient, at->gradient, num_elements * ofl_itemsize(gradient_dtype));
	if (has_first(rule))
		memcpy(first, at->first, state_bytes);
	if (has_second(rule))
		memcpy(second, at->second, state_bytes);
	step(k, &copy, rule, form, gradient_dtype, 0);
	memcpy(at->parameter, parameter, parameter_bytes);
	if (form != FORM_PARAMETER)
		memcpy(at->master, master, master_bytes);
	if (has_first(rule))
		memcpy(at->first, first, state_bytes);
	if (has_second(rule))
		memcpy(at->second, second, state_bytes);
}

/* Elements until the parameter is aligned for a streaming store. */
OFL_INLINE size_t head_elements(const void *parameter, size_t num_elements)
{
	size_t head = ((size_t)0 - (uintptr_t)parameter) % (OFL_STEP * sizeof(uint16_t)) /
		      sizeof(uint16_t);

	return head < num_elements ? head : num_elements;
}

/*
 * Rule, form and gradient dtype are constants here, so that each kind of pass is a loop
 * of its own.  Under codec fp32 the 16-bit parameter is written past the cache, so that
 * it need not be read to be written.  Streaming outputs that have just been read was
 * slower.
 */
OFL_INLINE void pass(const struct ofl_optim_operands *o, const struct constants *k,
		     int rule, enum form form, int gradient_dtype, size_t i, size_t stop)
{
	struct pointers at = pointers_at(o, rule, form, gradient_dtype, i);
	size_t head = head_elements(at.parameter, stop - i);

	if (form != FORM_PARAMETER && head) {
		partial_step(k, &at, rule, form, gradient_dtype, head);
		i += head;
	}
	for (; stop - i >= OFL_STEP; i += OFL_STEP) {
		at = pointers_at(o, rule, form, gradient_dtype, i);
		if (form == FORM_SPLIT || form == FORM_PARAMETER)
			prefetch(at.parameter, parameter_itemsize(form));
		if (form != FORM_PARAMETER)
			prefetch(at.master, master_itemsize(form));
		prefetch(at.gradient, ofl_itemsize(gradient_dtype));
		if (has_first(rule))
			prefetch(at.first, sizeof(float));
		if (has_second(rule))
			prefetch(at.second, sizeof(float));
		step(k, &at, rule, form, gradient_dtype, 1);
	}
	if (i < stop) {
		at = pointers_at(o, rule, form, gradient_dtype, i);
		partial_step(k, &at, rule, form, gradient_dtype, stop - i);
	}
	/* Streaming stores are ordered by nothing else before the pool's lock. */
	store_fence();
}

OFL_INLINE void pass_gradient(const struct ofl_optim_operands *o,
			      const struct constants *k, int rule, enum form form,
			      size_t start, size_t stop)
{
	if (o->gradient_dtype == OFL_OPTIM_BF16)
		pass(o, k, rule, form, OFL_OPTIM_BF16, start, stop);
	else if (o->gradient_dtype == OFL_OPTIM_F16)
		pass(o, k, rule, form, OFL_OPTIM_F16, start, stop);
	else
		pass(o, k, rule, form, OFL_OPTIM_F32, start, stop);
}

OFL_INLINE enum form form_of(const struct ofl_optim_operands *o)
{
	if (o->codec == OFL_OPTIM_SPLIT)
		return FORM_SPLIT;
	if (o->codec == OFL_OPTIM_PARAMETER)
		return FORM_PARAMETER;
	return o->parameter_dtype == OFL_OPTIM_F16 ? FORM_FP32_F16 : FORM_FP32_BF16;
}

OFL_INLINE void pass_form(const struct ofl_optim_operands *o, const struct constants *k,
			  int rule, size_t start, size_t stop)
{
	switch (form_of(o)) {
	case FORM_SPLIT:
		pass_gradient(o, k, rule, FORM_SPLIT, start, stop);
		break;
	case FORM_FP32_BF16:
		pass_gradient(o, k, rule, FORM_FP32_BF16, start, stop);
		break;
	case FORM_FP32_F16:
		pass_gradient(o, k, rule, FORM_FP32_F16, start, stop);
		break;
	default:
		pass_gradient(o, k, rule, FORM_PARAMETER, start, stop);
	}
}

static OFL_TARGET void update_range(const struct ofl_optim_operands *o,
				    const struct ofl_optim_scalars *s, size_t start,
				    size_t stop)
{
	const int base_is_gradient = !(s->c1 < 0.5f);
	const struct constants k = {
		.b1 = vf_set1(s->b1),
		.c1 = vf_set1(s->c1),
		.b2 = vf_set1(s->b2),
		.c2 = vf_set1(s->c2),
		.q = vf_set1(s->q),
		.w = vf_set1(s->w),
		.u = vf_set1(s->u),
		.r = vf_set1(s->r),
		.e = vf_set1(s->e),
		.a = vf_set1(s->a),
		.k1 = vf_set1(o->scales[0]),
		.k2 = vf_set1(o->scales[1]),
		.c = vf_set1(base_is_gradient ? -(1.0f - s->c1) : s->c1),
		.base_is_gradient = base_is_gradient,
		.is_scaled = o->scales[0] != 1.0f || o->scales[1] != 1.0f,
		.decays = s->w != 0.0f,
		.is_nesterov = s->is_nesterov,
	};

	switch (o->rule) {
	case OFL_OPTIM_ADAMW:
		pass_form(o, &k, OFL_OPTIM_ADAMW, start, stop);
		break;
	case OFL_OPTIM_ADAM:
		pass_form(o, &k, OFL_OPTIM_ADAM, start, stop);
		break;
	case OFL_OPTIM_LION:
		pass_form(o, &k, OFL_OPTIM_LION, start, stop);
		break;
	case OFL_OPTIM_SGD:
		pass_form(o, &k, OFL_OPTIM_SGD, start, stop);
		break;
	case OFL_OPTIM_MOMENTUM:
		pass_form(o, &k, OFL_OPTIM_MOMENTUM, start, stop);
		break;
	default:
		pass_form(o, &k, OFL_OPTIM_ADAGRAD, start, stop);
	}
}

static OFL_TARGET void masters(const struct ofl_optim_operands *o, size_t start,
			       size_t num_elements, float *out)
{
	const enum form form = form_of(o);
	size_t i = 0;

	for (; num_elements - i >= OFL_STEP; i += OFL_STEP) {
		struct pointers at =
			pointers_at(o, OFL_OPTIM_SGD, form, OFL_OPTIM_F32, start + i);
		vf p[2];

		load_master(&at, form, p);
		vf_store(out + i, p[0]);
		vf_store(out + i + OFL_WIDTH, p[1]);
	}
	if (i < num_elements)
		ofl_optim_scalar.master(o, start + i, num_elements - i, out + i);
}

// SPDX-License-Identifier: Apache-2.0
// A pool serves several threads at once and a forked child, and changes nobody's
// rounding.
#define _GNU_SOURCE
#include "check.h"
#include "optim.h"

#include <fenv.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUM_ELEMENTS ((size_t)300001) /* several slices and a tail */
#define NUM_CALLERS  4
#define NUM_STEPS    20

struct state {
	uint16_t *parameter, *gradient;
	int16_t *master_low;
	float *exp_avg, *exp_avg_sq;
	struct ofl_optim_pool *pool;
};

static void *allocated(size_t num_bytes)
{
	void *memory = calloc(1, num_bytes);

	CHECK(memory);
	return memory;
}

static struct state new_state(struct ofl_optim_pool *pool)
{
	struct state state = {
		.parameter = allocated(NUM_ELEMENTS * sizeof(uint16_t)),
		.gradient = allocated(NUM_ELEMENTS * sizeof(uint16_t)),
		.master_low = allocated(NUM_ELEMENTS * sizeof(int16_t)),
		.exp_avg = allocated(NUM_ELEMENTS * sizeof(float)),
		.exp_avg_sq = allocated(NUM_ELEMENTS * sizeof(float)),
		.pool = pool,
	};

	for (size_t i = 0; i < NUM_ELEMENTS; i++) {
		state.parameter[i] = (uint16_t)(0x3c00 + i % 97);
		state.gradient[i] = (uint16_t)(0x3a00 + i % 64);
	}
	return state;
}

static void free_state(struct state *state)
{
	free(state->parameter);
	free(state->gradient);
	free(state->master_low);
	free(state->exp_avg);
	free(state->exp_avg_sq);
}

static void *steps(void *argument)
{
	const struct state *state = argument;
	const struct ofl_optim_operands operands = {
		.rule = OFL_OPTIM_ADAMW,
		.codec = OFL_OPTIM_SPLIT,
		.gradient_dtype = OFL_OPTIM_BF16,
		.parameter = state->parameter,
		.master = state->master_low,
		.gradient = state->gradient,
		.first = state->exp_avg,
		.second = state->exp_avg_sq,
		.num_elements = NUM_ELEMENTS,
		.scales = {1.0f, 1.0f},
	};
	const struct ofl_optim_range range = {0,
					      NUM_ELEMENTS,
					      {.c1 = 0.1f,
					       .c2 = 0.05f,
					       .b2 = 0.95f,
					       .q = 0.99f,
					       .u = -1e-3f,
					       .r = 1.5f,
					       .e = 1e-8f}};

	for (int i = 0; i < NUM_STEPS; i++)
		CHECK_EQUAL(ofl_optim_update(state->pool, OFL_OPTIM_SCALAR, &operands,
					     &range, 1, NULL),
			    0);
	return NULL;
}

static int is_equal(const struct state *a, const struct state *b)
{
	return !memcmp(a->parameter, b->parameter, NUM_ELEMENTS * sizeof(uint16_t)) &&
	       !memcmp(a->master_low, b->master_low, NUM_ELEMENTS * sizeof(int16_t)) &&
	       !memcmp(a->exp_avg, b->exp_avg, NUM_ELEMENTS * sizeof(float)) &&
	       !memcmp(a->exp_avg_sq, b->exp_avg_sq, NUM_ELEMENTS * sizeof(float));
}

static void check_callers(const struct state *expected, struct ofl_optim_pool *pool)
{
	struct state states[NUM_CALLERS];
	pthread_t callers[NUM_CALLERS];

	for (int i = 0; i < NUM_CALLERS; i++) {
		states[i] = new_state(pool);
		CHECK_EQUAL(pthread_create(&callers[i], NULL, steps, &states[i]), 0);
	}
	for (int i = 0; i < NUM_CALLERS; i++) {
		CHECK_EQUAL(pthread_join(callers[i], NULL), 0);
		CHECK(is_equal(&states[i], expected));
		free_state(&states[i]);
	}
}

static void check_fork(const struct state *expected, struct ofl_optim_pool *pool)
{
	int status = -1;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		struct state state = new_state(pool);

		alarm(60); /* a child that waits for threads it has not fails, not hangs
			    */
		steps(&state);
		ofl_optim_pool_close(pool);
		_exit(is_equal(&state, expected) ? 0 : 1);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, 0);
}

static void check_rounding_mode(const struct state *expected, struct ofl_optim_pool *pool)
{
	struct state state = new_state(pool);

	CHECK_EQUAL(fesetround(FE_UPWARD), 0);
	steps(&state);
	CHECK_EQUAL(fegetround(), FE_UPWARD);
	CHECK_EQUAL(fesetround(FE_TONEAREST), 0);
	CHECK(is_equal(&state, expected));
	free_state(&state);
}

int main(void)
{
	struct ofl_optim_pool *alone, *pool;
	struct state expected;

	CHECK_EQUAL(ofl_optim_pool_open(&alone, 1), 0);
	CHECK_EQUAL(ofl_optim_pool_open(&pool, 3), 0);
	CHECK_EQUAL(ofl_optim_pool_num_threads(pool), 3);
	expected = new_state(alone);
	steps(&expected);

	check_callers(&expected, pool);
	check_fork(&expected, pool);
	check_rounding_mode(&expected, pool);

	free_state(&expected);
	ofl_optim_pool_close(pool);
	ofl_optim_pool_close(alone);
	return 0;
}

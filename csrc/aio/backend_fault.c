/* SPDX-License-Identifier: Apache-2.0 */
/* backend_fault.c - the backend "threads" with faults, delays and rates, for tests. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "queue.h"

#define NS_PER_S    1000000000ULL
#define NUM_VISITS  4096 /* a power of two */
#define PER_MILLION 1000000ULL

struct state {
	struct ofl_aio_faults faults; /* constant, as the rules it points to */
	struct ofl_aio_fault *rules;

	pthread_mutex_t lock; /* of all below */
	/* When the bytes granted so far have passed, in [0] for reads or both, [1]
	 * for writes. */
	uint64_t passed_ns[2];
	uint64_t *num_matches; /* per rule */
	/* Calls per place of a file, by hash: a retried call is a new throw. */
	uint32_t visits[NUM_VISITS];
};

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

static void sleep_until(uint64_t when_ns)
{
	const struct timespec time = {
		.tv_sec = (time_t)(when_ns / NS_PER_S),
		.tv_nsec = (long)(when_ns % NS_PER_S),
	};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

/* ---- which rule ---- */

/* Source: splitmix64 of Steele, Lea and Flood, OOPSLA 2014. */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t place_of(const struct ofl_aio_rest *rest)
{
	return mix(rest->offset * 2 + (uint64_t)rest->operation);
}

static bool is_about(const struct ofl_aio_fault *rule, const struct ofl_aio_rest *rest)
{
	int bit = rest->operation == OFL_AIO_READ ? OFL_AIO_FAULT_READS
						  : OFL_AIO_FAULT_WRITES;

	if (!(rule->operations & bit))
		return false;
	return rest->offset < rule->end && rest->offset + rest->len > rule->start;
}

/* The rule that decides the call, or NULL.  Which throw a call gets depends on its
 * place and on how often that was called, not on what other threads do. */
static const struct ofl_aio_fault *choose(struct state *state,
					  const struct ofl_aio_rest *rest)
{
	uint64_t place = place_of(rest);
	uint32_t visit = state->visits[place % NUM_VISITS]++;

	for (uint32_t i = 0; i < state->faults.num_rules; i++) {
		const struct ofl_aio_fault *rule = &state->rules[i];
		uint64_t seed = state->faults.seed + ((uint64_t)i << 32) + visit;
		uint64_t match;

		if (!is_about(rule, rest))
			continue;
		if (mix(place ^ mix(seed)) % PER_MILLION >= rule->per_million)
			continue;
		match = state->num_matches[i]++;
		if (match >= rule->skip && match - rule->skip < rule->count)
			return rule;
	}
	return NULL;
}

/* ---- rates ---- */

/* Token bucket: when the bytes will have passed at the rate, if the time before is
 * used up; at most burst_bytes of unused time are kept. */
static uint64_t reserve(struct state *state, int operation, size_t num_bytes)
{
	const struct ofl_aio_faults *f = &state->faults;
	uint64_t rate =
		operation == OFL_AIO_READ ? f->read_bytes_per_s : f->write_bytes_per_s;
	uint64_t *passed_ns = &state->passed_ns[!f->is_half_duplex && operation];
	uint64_t now = now_ns(), burst_ns;

	if (!rate)
		return now;
	burst_ns = (uint64_t)((double)f->burst_bytes * NS_PER_S / (double)rate);
	if (*passed_ns + burst_ns < now)
		*passed_ns = now - burst_ns;
	*passed_ns += (uint64_t)((double)num_bytes * NS_PER_S / (double)rate);
	return *passed_ns;
}

static ssize_t fault_transfer(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	struct state *state = queue->faults;
	struct ofl_aio_rest now = *rest;
	const struct ofl_aio_fault *rule;
	uint64_t started_ns = now_ns();
	uint64_t end_ns;
	ssize_t result;

	pthread_mutex_lock(&state->lock);
	rule = choose(state, rest);
	if (rule && rule->max_bytes && rule->max_bytes < now.len)
		now.len = rule->max_bytes;
	end_ns =
		rule && rule->error ? started_ns : reserve(state, now.operation, now.len);
	pthread_mutex_unlock(&state->lock);
	if (rule && rule->error)
		result = rule->error;
	else
		result = ofl_aio_backend_threads.transfer(queue, &now);
	if (rule && started_ns + rule->delay_ns > end_ns)
		end_ns = started_ns + rule->delay_ns;
	if (end_ns > now_ns())
		sleep_until(end_ns);
	return result;
}

/* ---- start and stop ---- */

static bool is_valid(const struct ofl_aio_faults *faults)
{
	for (uint32_t i = 0; i < faults->num_rules; i++) {
		const struct ofl_aio_fault *rule = &faults->rules[i];

		if (rule->error > 0 || rule->per_million > PER_MILLION ||
		    rule->delay_ns > INT64_MAX)
			return false;
	}
	return true;
}

static void free_state(struct state *state)
{
	free(state->num_matches);
	free(state->rules);
	free(state);
}

static struct state *copy_faults(const struct ofl_aio_faults *faults)
{
	/* One more than needed, as calloc(0) may give NULL. */
	size_t num = (size_t)faults->num_rules + 1;
	struct state *state = calloc(1, sizeof(*state));

	if (!state)
		return NULL;
	state->faults = *faults;
	state->rules = calloc(num, sizeof(*state->rules));
	state->num_matches = calloc(num, sizeof(*state->num_matches));
	if (!state->rules || !state->num_matches) {
		free_state(state);
		return NULL;
	}
	if (faults->num_rules)
		memcpy(state->rules, faults->rules,
		       faults->num_rules * sizeof(*state->rules));
	return state;
}

static int fault_start(struct ofl_aio *queue)
{
	static const struct ofl_aio_faults none;
	const struct ofl_aio_faults *faults = queue->options.faults;
	struct state *state;
	int error;

	if (!faults)
		faults = &none;
	if (!is_valid(faults))
		return -EINVAL;
	state = copy_faults(faults);
	if (!state)
		return -ENOMEM;
	error = -pthread_mutex_init(&state->lock, NULL);
	if (error)
		goto out_free;
	queue->faults = state;
	error = ofl_aio_backend_threads.start(queue);
	if (error)
		goto out_lock;
	return 0;

out_lock:
	pthread_mutex_destroy(&state->lock);
out_free:
	free_state(state);
	return error;
}

static void fault_wake(struct ofl_aio *queue, size_t num_pieces)
{
	ofl_aio_backend_threads.wake(queue, num_pieces);
}

static void fault_stop(struct ofl_aio *queue)
{
	struct state *state = queue->faults;

	ofl_aio_backend_threads.stop(queue);
	pthread_mutex_destroy(&state->lock);
	free_state(state);
}

const struct ofl_aio_backend_ops ofl_aio_backend_fault = {
	.name = "fault",
	.start = fault_start,
	.wake = fault_wake,
	.stop = fault_stop,
	.transfer = fault_transfer,
};

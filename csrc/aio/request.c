/* SPDX-License-Identifier: Apache-2.0 */
/* request.c - a request's life: made, waited for, announced, released. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "aio.h"
#include "queue.h"

static int init_done_condition(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;
	int error = pthread_condattr_init(&attributes);

	if (error)
		return -error;
	/* A change of the wall clock must not change a timeout. */
	error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	if (!error)
		error = pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
	return -error;
}

int ofl_aio_create_request(const struct ofl_aio_transfer *transfer,
			   struct ofl_aio_request **request)
{
	struct ofl_aio_request *r = calloc(1, sizeof(*r));
	int error;

	if (!r)
		return -ENOMEM;
	r->transfer = *transfer;
	r->result.done_bytes = transfer->len;
	atomic_init(&r->num_holds, 2);
	atomic_init(&r->is_done, false);
	r->submitted_ns = ofl_aio_now_ns();
	r->notify_fd = -1;
	error = -pthread_mutex_init(&r->lock, NULL);
	if (error)
		goto out_free;
	error = init_done_condition(&r->done);
	if (error)
		goto out_lock;
	*request = r;
	return 0;

out_lock:
	pthread_mutex_destroy(&r->lock);
out_free:
	free(r);
	return error;
}

void ofl_aio_release(struct ofl_aio_request *request)
{
	/* acq_rel: what the other holder did comes before the free() here. */
	if (atomic_fetch_sub_explicit(&request->num_holds, 1, memory_order_acq_rel) != 1)
		return;
	pthread_cond_destroy(&request->done);
	pthread_mutex_destroy(&request->lock);
	free(request);
}

static void write_event(int event_fd)
{
	const uint64_t one = 1;

	/* Fails only if the count is full, and then its reader is awake anyway. */
	if (write(event_fd, &one, sizeof(one)) < 0)
		return;
}

void ofl_aio_announce_done(struct ofl_aio_request *request)
{
	pthread_mutex_lock(&request->lock);
	/* release: a reader that sees it set sees the result and the bytes. */
	atomic_store_explicit(&request->is_done, true, memory_order_release);
	pthread_cond_broadcast(&request->done);
	/* Under the lock, so that ofl_aio_notify() can take the descriptor back. */
	if (request->notify_fd >= 0)
		write_event(request->notify_fd);
	pthread_mutex_unlock(&request->lock);
	ofl_aio_release(request);
}

int ofl_aio_notify(struct ofl_aio_request *request, int event_fd)
{
	int error = 0;

	pthread_mutex_lock(&request->lock);
	if (event_fd >= 0 && request->notify_fd >= 0)
		error = -EBUSY;
	else
		request->notify_fd = event_fd;
	if (!error && event_fd >= 0 && ofl_aio_is_done(request))
		write_event(event_fd);
	pthread_mutex_unlock(&request->lock);
	return error;
}

int ofl_aio_is_done(struct ofl_aio_request *request)
{
	/* acquire: pairs with the release in ofl_aio_announce_done(). */
	return atomic_load_explicit(&request->is_done, memory_order_acquire);
}

static struct timespec time_after(int64_t timeout_ns)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	time.tv_sec += timeout_ns / OFL_AIO_NS_PER_S;
	time.tv_nsec += timeout_ns % OFL_AIO_NS_PER_S;
	if (time.tv_nsec >= OFL_AIO_NS_PER_S) {
		time.tv_sec++;
		time.tv_nsec -= OFL_AIO_NS_PER_S;
	}
	return time;
}

int ofl_aio_wait(struct ofl_aio_request *request, int64_t timeout_ns)
{
	struct timespec deadline = {0};
	int error = 0;

	if (ofl_aio_is_done(request))
		return 0;
	if (timeout_ns == 0)
		return -ETIMEDOUT;
	if (timeout_ns > 0)
		deadline = time_after(timeout_ns);
	pthread_mutex_lock(&request->lock);
	while (!ofl_aio_is_done(request) && error != ETIMEDOUT) {
		if (timeout_ns < 0)
			error = pthread_cond_wait(&request->done, &request->lock);
		else
			error = pthread_cond_timedwait(&request->done, &request->lock,
						       &deadline);
	}
	pthread_mutex_unlock(&request->lock);
	return ofl_aio_is_done(request) ? 0 : -ETIMEDOUT;
}

int ofl_aio_result(struct ofl_aio_request *request, struct ofl_aio_result *result)
{
	if (!ofl_aio_is_done(request))
		return -EBUSY;
	*result = request->result;
	return 0;
}

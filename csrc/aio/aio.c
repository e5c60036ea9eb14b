/* SPDX-License-Identifier: Apache-2.0 */
/* aio.c - queues: opening, closing, registering, counters, and what threads need. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "aio.h"
#include "queue.h"

static const struct ofl_aio_backend_ops *const backends[] = {
	&ofl_aio_backend_uring,
	&ofl_aio_backend_libaio,
	&ofl_aio_backend_threads,
	&ofl_aio_backend_fault,
};

int64_t ofl_aio_now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * OFL_AIO_NS_PER_S + time.tv_nsec;
}

int ofl_aio_open(const struct ofl_aio_options *options, struct ofl_aio **queue)
{
	if (!options->backend)
		return -EINVAL;
	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		if (!strcmp(options->backend, backends[i]->name))
			return ofl_aio_open_with(backends[i], options, queue);
	return -EINVAL;
}

int ofl_aio_open_with(const struct ofl_aio_backend_ops *ops,
		      const struct ofl_aio_options *options, struct ofl_aio **queue)
{
	struct ofl_aio *q;
	int error;

	if (options->queue_depth < 1 || options->queue_depth > OFL_AIO_MAX_QUEUE_DEPTH)
		return -EINVAL;
	if (options->block_bytes < 1 || options->block_bytes > OFL_AIO_MAX_BLOCK_BYTES)
		return -EINVAL;
	q = calloc(1, sizeof(*q));
	if (!q)
		return -ENOMEM;
	q->ops = ops;
	q->options = *options;
	q->queue_depth = options->queue_depth;
	q->block_bytes = options->block_bytes;
	error = -pthread_mutex_init(&q->lock, NULL);
	if (error)
		goto out_free;
	error = ops->start(q);
	if (error)
		goto out_lock;
	q->options = (struct ofl_aio_options){0};
	*queue = q;
	return 0;

out_lock:
	pthread_mutex_destroy(&q->lock);
out_free:
	free(q);
	return error;
}

void ofl_aio_close(struct ofl_aio *queue)
{
	pthread_mutex_lock(&queue->lock);
	queue->is_closing = true;
	queue->ops->wake(queue, 0);
	pthread_mutex_unlock(&queue->lock);
	queue->ops->stop(queue);
	pthread_mutex_destroy(&queue->lock);
	free(queue);
}

int ofl_aio_register(struct ofl_aio *queue, void *buf, size_t len)
{
	int error;

	if (!buf || !len)
		return -EINVAL;
	if (!queue->ops->register_memory)
		return -EOPNOTSUPP;
	pthread_mutex_lock(&queue->lock);
	error = queue->ops->register_memory(queue, buf, len);
	pthread_mutex_unlock(&queue->lock);
	return error;
}

void ofl_aio_unregister(struct ofl_aio *queue, void *buf)
{
	if (!queue->ops->unregister_memory)
		return;
	pthread_mutex_lock(&queue->lock);
	queue->ops->unregister_memory(queue, buf);
	pthread_mutex_unlock(&queue->lock);
}

int ofl_aio_register_file(struct ofl_aio *queue, int fd)
{
	int error;

	if (fd < 0)
		return -EBADF;
	if (!queue->ops->register_file)
		return -EOPNOTSUPP;
	pthread_mutex_lock(&queue->lock);
	error = queue->ops->register_file(queue, fd);
	pthread_mutex_unlock(&queue->lock);
	return error;
}

void ofl_aio_unregister_file(struct ofl_aio *queue, int fd)
{
	if (!queue->ops->unregister_file)
		return;
	pthread_mutex_lock(&queue->lock);
	queue->ops->unregister_file(queue, fd);
	pthread_mutex_unlock(&queue->lock);
}

void ofl_aio_read_stats(struct ofl_aio *queue, struct ofl_aio_stats *stats)
{
	pthread_mutex_lock(&queue->lock);
	ofl_aio_count_time(queue, ofl_aio_now_ns());
	*stats = queue->stats;
	pthread_mutex_unlock(&queue->lock);
}

/* ---- for the backends' threads ---- */

int ofl_aio_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int error;

	/* Signals belong to the program's own threads. */
	sigfillset(&all);
	error = pthread_sigmask(SIG_SETMASK, &all, &before);
	if (error)
		return -error;
	error = pthread_create(thread, NULL, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error)
		pthread_setname_np(*thread, "ofl-aio");
	return -error;
}

void ofl_aio_pause(void)
{
	const struct timespec pause = {.tv_nsec = OFL_AIO_RETRY_NS};

	nanosleep(&pause, NULL);
}

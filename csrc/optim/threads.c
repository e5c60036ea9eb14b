// SPDX-License-Identifier: Apache-2.0
// The threads that kernels run on: they sleep between jobs and take tasks as they come.
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct job {
	ofl_optim_task_fn *run;
	const void *operands;
	size_t num_tasks;
	_Atomic size_t next_task;
};

struct ofl_optim_pool {
	pthread_mutex_t turn; /* held by the caller whose job is running */
	pthread_mutex_t lock; /* guards all below */
	pthread_cond_t has_job;
	pthread_cond_t has_left;
	struct job *job; /* NULL: nothing to join */
	int num_joined;	 /* workers inside the job */
	int is_closing;
	pid_t owner;
	int num_workers;
	pthread_t workers[];
};

static void run_tasks(struct job *job)
{
	for (;;) {
		/* Relaxed: a task's data is ordered by the pool's lock, at
		 * joining and at leaving; the counter only hands out numbers. */
		size_t task = atomic_fetch_add_explicit(&job->next_task, 1,
							memory_order_relaxed);

		if (task >= job->num_tasks)
			return;
		job->run(job->operands, task);
	}
}

/* A worker that wakes late finds no job and does not hold the caller up. */
static void *work(void *argument)
{
	struct ofl_optim_pool *pool = argument;

	fesetenv(FE_DFL_ENV);
	pthread_mutex_lock(&pool->lock);
	for (;;) {
		struct job *job = pool->job;

		if (pool->is_closing)
			break;
		if (!job || atomic_load_explicit(&job->next_task, memory_order_relaxed) >=
				    job->num_tasks) {
			pthread_cond_wait(&pool->has_job, &pool->lock);
			continue;
		}
		pool->num_joined++;
		pthread_mutex_unlock(&pool->lock);
		run_tasks(job);
		pthread_mutex_lock(&pool->lock);
		if (--pool->num_joined == 0)
			pthread_cond_signal(&pool->has_left);
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

/* Signals stay with the caller's threads: Python handles them on its main one. */
static int start_worker(struct ofl_optim_pool *pool)
{
	sigset_t all, before;
	int error;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&pool->workers[pool->num_workers], NULL, work, pool);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error)
		pool->num_workers++;
	return error;
}

static int init_locks(struct ofl_optim_pool *pool)
{
	if (pthread_mutex_init(&pool->turn, NULL))
		return -ENOMEM;
	if (pthread_mutex_init(&pool->lock, NULL))
		goto out_turn;
	if (pthread_cond_init(&pool->has_job, NULL))
		goto out_lock;
	if (pthread_cond_init(&pool->has_left, NULL))
		goto out_has_job;
	return 0;
out_has_job:
	pthread_cond_destroy(&pool->has_job);
out_lock:
	pthread_mutex_destroy(&pool->lock);
out_turn:
	pthread_mutex_destroy(&pool->turn);
	return -ENOMEM;
}

int ofl_optim_pool_open(struct ofl_optim_pool **pool, int num_threads)
{
	struct ofl_optim_pool *new;

	if (!pool || num_threads < 1)
		return -EINVAL;
	new = calloc(1,
		     sizeof(*new) + (size_t)(num_threads - 1) * sizeof(new->workers[0]));
	if (!new)
		return -ENOMEM;
	if (init_locks(new)) {
		free(new);
		return -ENOMEM;
	}
	new->owner = getpid();
	while (new->num_workers < num_threads - 1) {
		if (start_worker(new)) {
			ofl_optim_pool_close(new);
			return -EAGAIN;
		}
	}
	*pool = new;
	return 0;
}

void ofl_optim_pool_close(struct ofl_optim_pool *pool)
{
	/* A forked child has no workers to end, and perhaps a held lock: leave it. */
	if (!pool || pool->owner != getpid())
		return;
	pthread_mutex_lock(&pool->lock);
	pool->is_closing = 1;
	pthread_cond_broadcast(&pool->has_job);
	pthread_mutex_unlock(&pool->lock);
	for (int i = 0; i < pool->num_workers; i++)
		pthread_join(pool->workers[i], NULL);
	pthread_cond_destroy(&pool->has_left);
	pthread_cond_destroy(&pool->has_job);
	pthread_mutex_destroy(&pool->lock);
	pthread_mutex_destroy(&pool->turn);
	free(pool);
}

int ofl_optim_pool_num_threads(const struct ofl_optim_pool *pool)
{
	return pool ? pool->num_workers + 1 : -EINVAL;
}

static void run_shared(struct ofl_optim_pool *pool, struct job *job)
{
	pthread_mutex_lock(&pool->turn);
	pthread_mutex_lock(&pool->lock);
	pool->job = job;
	pthread_cond_broadcast(&pool->has_job);
	pthread_mutex_unlock(&pool->lock);

	run_tasks(job);

	pthread_mutex_lock(&pool->lock);
	pool->job = NULL;
	while (pool->num_joined > 0)
		pthread_cond_wait(&pool->has_left, &pool->lock);
	pthread_mutex_unlock(&pool->lock);
	pthread_mutex_unlock(&pool->turn);
}

void ofl_optim_pool_run(struct ofl_optim_pool *pool, ofl_optim_task_fn *run,
			const void *operands, size_t num_tasks)
{
	struct job job = {.run = run, .operands = operands, .num_tasks = num_tasks};
	fenv_t before;

	/* The caller may flush subnormals (torch.set_flush_denormal): kernels don't. */
	fegetenv(&before);
	fesetenv(FE_DFL_ENV);
	if (num_tasks < 2 || pool->num_workers == 0 || pool->owner != getpid())
		run_tasks(&job);
	else
		run_shared(pool, &job);
	fesetenv(&before);
}

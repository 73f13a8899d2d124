/* The kernels' thread pool.
 *
 * Work is handed out in units from a counter, and the caller never waits for a thread that has
 * taken none: on a busy machine a worker that the system has put aside costs nothing, where a
 * barrier would wait for its next time slice. Workers look out for new work for SPIN_NS, since the
 * next kernel of a step follows within microseconds, then sleep.
 *
 * A worker that finds itself on the caller's CPU leaves it for good: some schedulers (small virtual
 * machines above all) wake it there again and again, and the two would take turns on one CPU while
 * another is idle.
 */
#define _GNU_SOURCE
#include "octavo_cpu.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { SPIN_NS = 100000, SPINS_BETWEEN_LOOKS = 64, SPINS_BEFORE_YIELD = 4096, MAX_THREADS = 4096 };

/* pool.ticket: the job's number, whether workers may still join it, and how many are in it. */
#define JOINED_MASK UINT64_C(0x7fff)
#define OPEN_BIT UINT64_C(0x8000)
#define JOB_SHIFT 16

static struct {
    pthread_mutex_t caller; /* one job at a time */
    pthread_mutex_t lock;   /* guards sleeping */
    pthread_cond_t wake;
    int num_workers; /* changed by the caller only */
    atomic_int num_sleeping;
    _Atomic uint64_t ticket;
    atomic_int_fast64_t next_unit;
    /* The job; written while nobody is in it. */
    octavo_body body;
    void *arg;
    int64_t num_units;
    _Atomic uint64_t max_joined; /* these two are also read by workers that then stay outside */
    atomic_int caller_cpu;
} pool = {
    .caller = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

OCTAVO_INLINE void pause_cpu(void) {
#if OCTAVO_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void run_units(void) {
    int64_t unit;
    while ((unit = atomic_fetch_add(&pool.next_unit, 1)) < pool.num_units)
        pool.body(pool.arg, unit);
}

/* Whether there is a job that this worker has not seen and may join. */
static int is_news(uint64_t ticket, uint64_t last_job) {
    return (ticket & OPEN_BIT) && (ticket >> JOB_SHIFT) != last_job &&
           (ticket & JOINED_MASK) < pool.max_joined;
}

#if defined(__linux__)
static int current_cpu(void) { return sched_getcpu(); }

static void leave_cpu(int cpu, const cpu_set_t *allowed) {
    cpu_set_t others = *allowed;
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
}
#else
typedef int cpu_set_t;
static int current_cpu(void) { return -1; }
static void leave_cpu(int cpu, const cpu_set_t *allowed) { (void)cpu, (void)allowed; }
#endif

static void sleep_until_news(uint64_t last_job) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.num_sleeping, 1);
    /* Once woken it looks out for SPIN_NS again, even if it came too late for this job. */
    if (!is_news(atomic_load(&pool.ticket), last_job)) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.num_sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *work(void *unused) {
    uint64_t last_job = 0;
    int64_t since = now_ns();
    cpu_set_t allowed;
#if defined(__linux__)
    sched_getaffinity(0, sizeof allowed, &allowed);
#endif
    for (unsigned spins = 0;; spins++) {
        uint64_t ticket = atomic_load(&pool.ticket);
        if (is_news(ticket, last_job)) {
            /* Before joining: from then on the caller waits. */
            const int cpu = atomic_load(&pool.caller_cpu);
            if (cpu >= 0 && cpu == current_cpu()) leave_cpu(cpu, &allowed);
            if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) continue;
            last_job = ticket >> JOB_SHIFT;
            run_units();
            atomic_fetch_sub(&pool.ticket, 1);
            since = now_ns();
        } else if (spins % SPINS_BETWEEN_LOOKS == 0 && now_ns() - since > SPIN_NS) {
            sleep_until_news(last_job);
            since = now_ns();
        } else {
            pause_cpu();
        }
    }
    return unused;
}

/* After a fork the child has no workers, and locks may be in any state. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.num_workers = 0;
    atomic_store(&pool.num_sleeping, 0);
    atomic_store(&pool.ticket, atomic_load(&pool.ticket) >> JOB_SHIFT << JOB_SHIFT);
}

/* Grows the pool; with fewer workers than asked for, those that started do all the work. */
static void start_workers(int wanted) {
    static atomic_flag handles_fork = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&handles_fork)) pthread_atfork(NULL, NULL, forget_workers);
    while (pool.num_workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) return;
        pthread_detach(thread);
        pool.num_workers++;
    }
}

void octavo_parallel(octavo_body body, void *arg, int64_t num_units, int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads > num_units) num_threads = (int)num_units;
    if (num_threads <= 1 || pthread_mutex_trylock(&pool.caller)) {
        for (int64_t unit = 0; unit < num_units; unit++) body(arg, unit);
        return;
    }
    if (pool.num_workers < num_threads - 1) start_workers(num_threads - 1);
    pool.body = body;
    pool.arg = arg;
    pool.num_units = num_units;
    atomic_store(&pool.max_joined, (uint64_t)(num_threads - 1));
    atomic_store(&pool.caller_cpu, current_cpu());
    atomic_store(&pool.next_unit, 0);
    const uint64_t job = (atomic_load(&pool.ticket) >> JOB_SHIFT) + 1;
    atomic_store(&pool.ticket, job << JOB_SHIFT | OPEN_BIT);
    if (atomic_load(&pool.num_sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    run_units();
    atomic_fetch_and(&pool.ticket, ~OPEN_BIT);
    for (unsigned spins = 0; atomic_load(&pool.ticket) & JOINED_MASK; spins++) {
        if (spins < SPINS_BEFORE_YIELD)
            pause_cpu();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&pool.caller);
}

struct team {
    void (*body)(void *);
    void *arg;
};

static void team_member(void *team, int64_t unit) {
    (void)unit;
    ((struct team *)team)->body(((struct team *)team)->arg);
}

void octavo_team(void (*body)(void *), void *arg, int num_threads) {
    struct team team = {body, arg};
    octavo_parallel(team_member, &team, num_threads, num_threads);
}

/* Recorded kernel calls; see trace.py. */
struct replay_call {
    int64_t (*function)(const void *);
    const void *args;
};

struct replay_args {
    int64_t num_calls;
    const struct replay_call *calls;
};

/* Returns 0, or 1 + the first call whose status was not 0; later ones are not made. */
OCTAVO_EXPORT int64_t octavo_replay(const struct replay_args *a) {
    for (int64_t i = 0; i < a->num_calls; i++)
        if (a->calls[i].function(a->calls[i].args)) return i + 1;
    return 0;
}

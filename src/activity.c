/*-------------------------------------------------------------------------
 *
 * activity.c
 *	  Which keys each session holds or waits for now.
 *
 * Every backend has a place of fixed size in shared memory, which only it
 * writes: a counter is odd while it does, so that a reader knows to look
 * again, as for pg_stat_activity.  Nothing that can fail is done in between.
 *
 * A claim is listed from when it was made to the end of its transaction,
 * since that is how long its key is locked; or until a savepoint that made
 * it is rolled back.  A prepared transaction has no backend and is not here.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/ipc.h"
#include "storage/shmem.h"

#include "activity.h"
#include "compat.h"
#include "key.h"

StaticAssertDecl(IDEM_ACTIVITY_KEY_SIZE == IDEM_KEY_MAX_BYTES,
				 "a listed key must fit");

/* A place that idem_activity_hold() gives to a claim that is not listed */
#define PLACE_MORE	(IDEM_ACTIVITY_KEYS + 1)

typedef struct ActivitySlot
{
	pg_atomic_uint32 changes;
	IdemActivity activity;
} ActivitySlot;

static ActivitySlot *slots = NULL;
static ActivitySlot *mine = NULL;
static int	held = 0;			/* keys held, listed or not */

Size
idem_activity_size(void)
{
	return mul_size(sizeof(ActivitySlot), MaxBackends);
}

void
idem_activity_startup(void)
{
	bool		found;

	slots = ShmemInitStruct("idem activity", idem_activity_size(), &found);
	if (!found)
	{
		memset(slots, 0, idem_activity_size());
		for (int i = 0; i < MaxBackends; i++)
			pg_atomic_init_u32(&slots[i].changes, 0);
	}
}

static inline void
begin_change(void)
{
	pg_atomic_write_u32(&mine->changes,
						pg_atomic_read_u32(&mine->changes) + 1);
	pg_write_barrier();
}

static inline void
end_change(void)
{
	pg_write_barrier();
	pg_atomic_write_u32(&mine->changes,
						pg_atomic_read_u32(&mine->changes) + 1);
}

static void
on_backend_exit(int code, Datum arg)
{
	begin_change();
	mine->activity.pid = 0;
	end_change();
}

/*
 * Take this backend's place; false if it has none.
 */
static bool
take_place(void)
{
	int			number = idem_proc_number();

	if (mine != NULL)
		return true;
	if (slots == NULL || number < 0 || number >= MaxBackends)
		return false;
	on_shmem_exit(on_backend_exit, (Datum) 0);
	mine = &slots[number];

	/* Whoever had it before was killed in the middle of a change, perhaps */
	if (pg_atomic_read_u32(&mine->changes) % 2 == 1)
		end_change();
	begin_change();
	memset(&mine->activity, 0, sizeof(mine->activity));
	mine->activity.pid = MyProcPid;
	mine->activity.database = MyDatabaseId;
	mine->activity.role = GetSessionUserId();
	end_change();
	return true;
}

static void
set_key(IdemActivityKey *place, Oid store, const text *key, TimestampTz since)
{
	place->store = store;
	place->len = Min(VARSIZE_ANY_EXHDR(key), IDEM_ACTIVITY_KEY_SIZE);
	memcpy(place->key, VARDATA_ANY(key), place->len);
	place->since = since;
}

/*
 * List a claim; returns its place for idem_activity_drop(), 0 for none.
 */
int
idem_activity_hold(Oid store, const text *key, TimestampTz since)
{
	int			place = PLACE_MORE;

	if (!take_place())
		return 0;
	held++;
	for (int i = 0; i < IDEM_ACTIVITY_KEYS && place == PLACE_MORE; i++)
		if (!OidIsValid(mine->activity.held[i].store))
			place = i + 1;

	begin_change();
	mine->activity.role = GetSessionUserId();
	if (place == PLACE_MORE)
		mine->activity.more++;
	else
		set_key(&mine->activity.held[place - 1], store, key, since);
	end_change();
	return place;
}

/*
 * A savepoint took the claim back.  Cannot fail.
 */
void
idem_activity_drop(int place)
{
	if (place == 0 || mine == NULL)
		return;
	held--;
	begin_change();
	if (place == PLACE_MORE)
		mine->activity.more--;
	else
		mine->activity.held[place - 1].store = InvalidOid;
	end_change();
}

/*
 * The transaction is over.  Cannot fail.
 */
void
idem_activity_end(void)
{
	if (held == 0)
		return;
	held = 0;
	begin_change();
	for (int i = 0; i < IDEM_ACTIVITY_KEYS; i++)
		mine->activity.held[i].store = InvalidOid;
	mine->activity.more = 0;
	end_change();
}

/*
 * This backend is about to wait for a key.
 */
void
idem_activity_wait(Oid store, const text *key, TimestampTz since)
{
	if (!take_place())
		return;
	begin_change();
	mine->activity.role = GetSessionUserId();
	set_key(&mine->activity.waiting, store, key, since);
	end_change();
}

/*
 * The wait is over.  Cannot fail.
 */
void
idem_activity_waited(void)
{
	if (mine == NULL)
		return;
	begin_change();
	mine->activity.waiting.store = InvalidOid;
	end_change();
}

int
idem_activity_slots(void)
{
	return slots == NULL ? 0 : MaxBackends;
}

/*
 * Copy what a backend has in its place; false if there is nothing.
 */
bool
idem_activity_read(int slot, IdemActivity *copy)
{
	ActivitySlot *s = &slots[slot];

	for (;;)
	{
		uint32		before = pg_atomic_read_u32(&s->changes);

		pg_read_barrier();
		memcpy(copy, &s->activity, sizeof(IdemActivity));
		pg_read_barrier();
		if (before % 2 == 0 && pg_atomic_read_u32(&s->changes) == before)
			break;
		CHECK_FOR_INTERRUPTS();
	}
	return copy->pid != 0;
}

/*
 * lease.pml: effects outside the database.
 *
 * SESSIONS sessions make ATTEMPTS attempts each on a key: a lease with one of
 * the three policies, a plain claim, or a decision by idem_resolve().  Who
 * has got a lease completes it, releases it, extends it, or is never heard of
 * again; every transaction may roll back instead.  Leases run out at any
 * time.  Meanwhile the current generation changes and leases are carried
 * over; a generation without a row is emptied.
 *
 * Checked when a transaction commits:
 *	Once			one end of the operation: completed or skipped
 *	Tokens			grow with every lease of the key; only the latest holder
 *					completes, releases or extends
 *	Never a guess	nobody gets the key while a lease is open, but by "retry"
 *					after it has run out
 *	Same answer		a replay is what was stored, also to the holder who asks
 *					twice
 *	No lost work	everybody comes to an end						(Judge)
 */
#ifndef SESSIONS
#define SESSIONS		3
#endif
#define KEYS			1
#define GENERATIONS		3
#ifndef ATTEMPTS
#define ATTEMPTS		1
#endif
#ifndef FLIPS
#define FLIPS			2
#endif
#ifndef FAILURES
#define FAILURES		1
#endif
#ifndef EXTENSIONS
#define EXTENSIONS		1
#endif
#define WRITTEN_AT(r)	skip
#define COMMITTED_AT(r)	skip
#define ABORTED_AT(r)	skip
#define FLIPPED			flips--
#include "protocol.pml"

byte flips = FLIPS, failures = FAILURES, extensions = EXTENSIONS;
byte last_value;				/* of the sequence */
bool over;						/* the open lease has run out */

/* What is known outside of idem's view */
byte holder;					/* token of the open lease, committed */
byte last_token;				/* of the latest lease ever committed */
byte ended;						/* the record that ended the operation */
byte gone;						/* sessions that have come to their end */

/*
 * What the transaction has made of the record must follow from what was
 * committed before.
 */
inline commit()
{
	d_step {
		for (r : 0 .. ROWS - 1) {
			if
			:: writer[r] == me && OWN_VIEW(r) != NONE ->
				assert(ended == NONE);
				if
				:: STATUS(OWN_VIEW(r)) == LEASED && !taking ->
					assert(holder == VALUE(OWN_VIEW(r)));
					over = false
				:: STATUS(OWN_VIEW(r)) == LEASED && taking ->
					assert(VALUE(OWN_VIEW(r)) > last_token);
					assert(holder == 0 || (retry && over));
					holder = VALUE(OWN_VIEW(r)); last_token = holder;
					over = false
				:: STATUS(OWN_VIEW(r)) == RELEASED ->
					assert(holder != 0 && holder == VALUE(OWN_VIEW(r)));
					holder = 0; over = false
				:: FINAL(OWN_VIEW(r)) ->
					assert(holder == VALUE(OWN_VIEW(r)));
					ended = OWN_VIEW(r); holder = 0; over = false
				fi
			:: else
			fi
		}
		r = 0;
		make_visible(); release_locks();
		REFRESH;
		committing = true
	}
}

inline abort()
{
	d_step {
		failures > 0 ->
		failures--;
		undo_rows(); release_locks();
		REFRESH;
		committing = false
	}
}

inline unlock()
{
	d_step {
		if
		:: outcome == GOT -> DROP_LOCK(k)
		:: else
		fi;
		outcome = 0; found = NONE; found_in = 0; in_flux = 0
	}
}

/*
 * [write_and_unlock] From here on, the uncommitted row is waited for.
 */
inline write_and_unlock(content)
{
#ifdef UNLOCK_EARLY
	d_step { DROP_LOCK(k) }
	write_record(content);
#else
	write_record(content);
	d_step { DROP_LOCK(k) }
#endif
	end_transaction()
}

inline end_transaction()
{
	assert(CONFLICTS || outcome != CONFLICT);
	if
	:: outcome == CONFLICT ->
		d_step { undo_rows(); release_locks(); REFRESH; committing = false }
	:: else ->
		if
		:: commit()
		:: abort()
		fi
	fi;
	outcome = 0
}

/*
 * [lease_key, claim_key, idem_resolve_key]  Leaves a token where it got a
 * lease.  Which of the calls it was, and with which policy, is decided where
 * it makes a difference.
 */
inline attempt()
{
	lock_and_find();
	if
	:: FINAL(found) ->
		assert(found == ended);
		unlock()
	:: STATUS(found) == LEASED && !over ->
		unlock()				/* in progress */
	:: STATUS(found) == LEASED && over ->
		if
		:: unlock()				/* a claim, or "reconcile": uncertain */
		:: write_and_unlock(CONTENT(SKIPPED, VALUE(found)))
		:: write_and_unlock(CONTENT(COMPLETED, VALUE(found)))
		:: write_and_unlock(CONTENT(RELEASED, VALUE(found)))
		:: retry = true; take_lease()
		fi
	:: !FINAL(found) && STATUS(found) != LEASED ->
		if
		:: unlock()				/* nothing to resolve */
		:: take_lease()
		:: /* [idem_complete_claim] the lock stays to the end */
			if
			:: found == NONE
			:: else ->
				d_step { START_LOOKING }
				look_everywhere()
			fi;
			if
			:: in_flux == 0 && !FINAL(found) && STATUS(found) != LEASED ->
				write_record(CONTENT(COMPLETED, 0))
			:: else -> outcome = CONFLICT
			fi;
			end_transaction()
		fi
	fi
}

/* [take_lease, next_token] */
inline take_lease()
{
	d_step {
		last_value++; token = last_value;
#ifdef TOKEN_KEPT
		token = (STATUS(found) == LEASED -> VALUE(found) : token);
#endif
		taking = true
	}
	write_and_unlock(CONTENT(LEASED, token));
	d_step { token = (committing -> token : 0); taking = false; retry = false }
}

/*
 * [idem_complete_lease, idem_release_lease, idem_extend_lease] with the token
 */
#ifdef NO_TOKEN_CHECK
#define HOLDS_LEASE		(STATUS(found) == LEASED)
#else
#define HOLDS_LEASE		(STATUS(found) == LEASED && VALUE(found) == token)
#endif

inline use_token(status)
{
	lock_and_find();
	if
	:: HOLDS_LEASE ->
		write_and_unlock(CONTENT(status, token))
	:: !HOLDS_LEASE ->
		/* who asks twice gets the same, who was superseded ID005 */
		assert(!FINAL(found) || found == ended);
		unlock()
	fi
}

proctype Session(byte me)
{
	SESSION_STATE;
	byte attempts = ATTEMPTS;
	byte token;
	bool taking, retry, committing;

	begun == me - 1;
	do
	:: attempts > 0 ->
		attempts--;
		attempt();
		committing = false;
		do
		:: token != 0 -> use_token(COMPLETED)
		:: token != 0 -> use_token(RELEASED); token = 0
		:: d_step { token != 0 && extensions > 0 -> extensions-- }
			use_token(LEASED)
		:: token != 0 -> token = 0				/* not heard of again */
		:: token == 0 -> break
		od;
	:: attempts == 0 -> break
	od;
	skip;
	d_step { FORGET_STORE; gone++ }
}

/* No row, no writer: by what expiry.pml checks, it may be emptied */
#define NO_ROW(g)		(committed[g] == NONE && writer[g] == 0)

proctype Worker(byte me)
{
	SESSION_STATE;
end:
	do
	:: flip(flips > 0)
	:: carry_over(0)
	:: carry_over(1)
	:: carry_over(2)
	:: d_step {
			(has_blocks[0] && current != 0 && NO_ROW(0) && WRITERS(0) == 0) ->
			has_blocks[0] = false
		}
	:: d_step {
			(has_blocks[1] && current != 1 && NO_ROW(1) && WRITERS(1) == 0) ->
			has_blocks[1] = false
		}
	:: d_step {
			(has_blocks[2] && current != 2 && NO_ROW(2) && WRITERS(2) == 0) ->
			has_blocks[2] = false
		}
	od
}

proctype Clock()
{
end:
	do
	:: d_step { holder != 0 && !over -> over = true }
	od
}

active proctype Judge()
{
	timeout ->
	assert(gone == SESSIONS)
}

init {
	byte s;
	atomic {
		for (s : 1 .. SESSIONS) { run Session(s) }
		run Worker(WORKER); run Clock()
	}
}

/*-------------------------------------------------------------------------
 *
 * expiry.h
 *	  The state machine of generations.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_EXPIRY_H
#define IDEM_EXPIRY_H

#include "postgres_ext.h"

/*
 * What has been tried in this round and need not be tried again.  Start with
 * zeroes for each store and round.
 */
typedef struct IdemExpiryRound
{
	bool		tried[100];		/* by generation: IDEM_MAX_GENERATIONS */
	int			ntried;
	bool		failed;			/* a step has failed; for round.c */
} IdemExpiryRound;

extern bool idem_expiry_step(Oid store, IdemExpiryRound *round);

#endif							/* IDEM_EXPIRY_H */

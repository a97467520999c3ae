/*-------------------------------------------------------------------------
 *
 * activity.h
 *	  Which keys each session holds or waits for now.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ACTIVITY_H
#define IDEM_ACTIVITY_H

#include "datatype/timestamp.h"

/* The keys of one session that are listed; more are only counted */
#define IDEM_ACTIVITY_KEYS	4

/* Of key.h, which this need not include */
#define IDEM_ACTIVITY_KEY_SIZE	512

typedef struct IdemActivityKey
{
	Oid			store;			/* InvalidOid: nothing here */
	int			len;
	TimestampTz since;
	char		key[IDEM_ACTIVITY_KEY_SIZE];
} IdemActivityKey;

typedef struct IdemActivity
{
	int			pid;			/* 0: nothing here */
	Oid			database;
	Oid			role;			/* session user */
	int			more;			/* claims that are not listed */
	IdemActivityKey held[IDEM_ACTIVITY_KEYS];
	IdemActivityKey waiting;
} IdemActivity;

extern Size idem_activity_size(void);
extern void idem_activity_startup(void);
extern int	idem_activity_hold(Oid store, const text *key, TimestampTz since);
extern void idem_activity_drop(int place);
extern void idem_activity_end(void);
extern void idem_activity_wait(Oid store, const text *key, TimestampTz since);
extern void idem_activity_waited(void);
extern int	idem_activity_slots(void);
extern bool idem_activity_read(int slot, IdemActivity *copy);

#endif							/* IDEM_ACTIVITY_H */

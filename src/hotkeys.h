/*-------------------------------------------------------------------------
 *
 * hotkeys.h
 *	  The keys that are replayed most often.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HOTKEYS_H
#define IDEM_HOTKEYS_H

#include "datatype/timestamp.h"

#define IDEM_HOTKEY_SIZE	512

typedef struct IdemHotKey
{
	Oid			database;		/* InvalidOid: free */
	Oid			store;
	Oid			role;			/* session user who replayed it */
	int			len;
	uint64		hash;
	uint64		count;			/* of replays; not too small */
	uint64		error;			/* by which it may be too large */
	TimestampTz first_at;		/* since when it is counted */
	TimestampTz last_at;
	char		key[IDEM_HOTKEY_SIZE];
} IdemHotKey;

extern Size idem_hotkeys_size(void);
extern void idem_hotkeys_startup(void);
extern void idem_hotkeys_note(Oid store, const text *key, uint64 hash);
extern void idem_hotkeys_forget(Oid database, Oid store);
extern int	idem_hotkeys_read(Oid database, IdemHotKey **keys);

#endif							/* IDEM_HOTKEYS_H */

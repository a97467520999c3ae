/*-------------------------------------------------------------------------
 *
 * write.h
 *	  Write, replace and delete records of a store.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WRITE_H
#define IDEM_WRITE_H

#include "storage/itemptr.h"
#include "storage/lock.h"

struct IdemStore;
struct IdemRecord;

extern void idem_record_insert(struct IdemStore *store, text *key,
							   bool look_again, struct IdemRecord *record);
extern bool idem_record_update_own(struct IdemStore **store, text *key,
								   const LOCKTAG *tag, int generation,
								   ItemPointer tid, struct IdemRecord *record);
extern void idem_record_replace(struct IdemStore *store, text *key,
								struct IdemRecord *old,
								struct IdemRecord *record);
extern void idem_record_delete(struct IdemStore **store, text *key,
							   struct IdemRecord *record, int keep);

#endif							/* IDEM_WRITE_H */

/*-------------------------------------------------------------------------
 *
 * round.h
 *	  A round of expiry over the stores of a database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ROUND_H
#define IDEM_ROUND_H

struct IdemExpiryRound;

extern bool idem_round_step(Oid store, struct IdemExpiryRound *round);

#endif							/* IDEM_ROUND_H */

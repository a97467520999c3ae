'use strict';

const CLAIM = `SELECT claimed, result::text AS result
                 FROM idem_claim($1, request => $2::jsonb)`;
const COMPLETE = 'SELECT idem_complete($1, $2::json)::text AS result';

/*
 * Runs handler(client) once for a key, in one transaction with its claim, and
 * answers every duplicate with what that run returned.
 *
 * The result is JSON text, the bytes that were stored: node-postgres would
 * parse a json column, and lose digits.  If this throws, nothing is known to
 * be done: whoever delivers the operation delivers it again, with the same key.
 * The error's code is the SQLSTATE; see shouldRetry().
 */
async function withIdem(pool, key, request, handler) {
  const client = await pool.connect();
  client.on('error', ignore); // a lost connection fails the next query, too
  let lost;
  try {
    await client.query('BEGIN');
    const claim = await client.query(CLAIM, [key, JSON.stringify(request)]);
    let { claimed, result } = claim.rows[0];
    if (claimed) {
      const value = await handler(client);
      const done = await client.query(COMPLETE, [key, JSON.stringify(value)]);
      result = done.rows[0].result;
    }
    await client.query('COMMIT');
    return { claimed, result };
  } catch (error) {
    await client.query('ROLLBACK').catch((e) => { lost = e; });
    if (lost) error.code ??= '08006'; // connection_failure, however it showed
    throw error;
  } finally {
    client.off('error', ignore);
    client.release(lost); // a lost connection leaves the pool
  }
}

function ignore() {}

const RETRY = new Set([
  '40001', // serialization_failure
  '40P01', // deadlock_detected
  'ID002', // idem_in_progress: the operation is still running
  '57P01', '57P02', '57P03', // the server is going down, or is not up yet
  '08000', '08003', '08006', 'ECONNREFUSED', 'ECONNRESET', 'EPIPE',
]);

/*
 * Whether the same call may succeed later.  Everything else needs a person or
 * another request: ID001, say, means that the key belongs to another request.
 */
function shouldRetry(error) {
  return RETRY.has(error.code);
}

module.exports = { withIdem, shouldRetry };

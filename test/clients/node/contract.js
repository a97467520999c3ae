'use strict';

/*
 * Plays a file of test/clients/contract/ through node-postgres.
 *
 *     node contract.js FILE PREFIX PORT LOST-REPLY-PORT LOST-REQUEST-PORT [OPTION]...
 *
 * Options: prepare (each statement is named, so prepared on the server), and
 * pooling=MODE, which only says which cases are wanted.
 *
 * The last line is "N passed, N failed".
 */

const { createHash } = require('node:crypto');
const { readFileSync } = require('node:fs');
const { setTimeout: pause } = require('node:timers/promises');
const { Client } = require('pg');

const PATIENCE = 60000; // milliseconds

class Broken extends Error {} // the contract is

const listItem = (item) => (item === 'NULL' ? null : item);

/* What an indented line says of the step above it. */
const DETAILS = {
  arg: (step, rest) => step.args.push(rest),
  int: (step, rest) => step.args.push(Number(rest)),
  null: (step) => step.args.push(null),
  array: (step, rest) => step.args.push(rest.split('|').map(listItem)),
  row: (step, rest) => { step.rows = [...(step.rows ?? []), rest]; },
  no: (step) => { step.rows = []; },
  error: (step, rest) => { step.error = rest; },
  keep: (step, rest) => { step.keep = rest; },
  lost: (step) => { step.lost = true; },
};

/* The cases that are for these options, as [title, steps]. */
function readCases(file, options) {
  const cases = [];
  let current;
  readFileSync(file, 'utf8').split('\n').forEach((line, i) => {
    if (!line.trim() || line.startsWith('#')) return;
    const [, indent, word, rest] = /^( *)(\S+) ?(.*)$/.exec(line);
    if (line.startsWith('== ')) {
      current = { title: rest, steps: [], wanted: true };
      cases.push(current);
    } else if (!indent) {
      const [, verb, text] = /^(\S+) ?(.*)$/.exec(rest);
      current.steps.push({ number: i + 1, connection: word, verb, rest: text, args: [] });
    } else if (current.steps.length) {
      DETAILS[word](current.steps.at(-1), rest);
    } else if (options.includes(rest) !== (word === 'only')) {
      current.wanted = false;
    }
  });
  return cases.filter((one) => one.wanted);
}

function asText(value) {
  if (value === null) return 'NULL';
  if (typeof value === 'boolean') return value ? 't' : 'f';
  return String(value);
}

class Connection {
  static async open(port, options) {
    const connection = new Connection();
    connection.client = new Client({ host: '127.0.0.1', port });
    connection.client.on('error', () => { connection.lost = true; });
    connection.client.on('end', () => { connection.lost = true; });
    connection.prepare = options.includes('prepare');
    await connection.client.connect();
    return connection;
  }

  async query(text, args = []) {
    const query = { text, values: args, rowMode: 'array' };
    if (this.prepare && args.length) {
      query.name = createHash('md5').update(text).digest('hex');
    }
    return (await this.client.query(query)).rows;
  }

  /* Returns rows, or undefined where there can be none. */
  async step({ verb, rest }, args) {
    switch (verb) {
      case 'run': return this.query(rest, args);
      case 'begin':
        await this.client.query(rest ? `BEGIN ISOLATION LEVEL ${rest}` : verb);
        return undefined;
      case 'commit': case 'savepoint': case 'rollback':
        await this.client.query(`${verb} ${rest}`);
        return undefined;
      case 'start':
        this.answer = this.query(rest, args);
        this.answer.catch(() => {}); // whoever finishes gets to know
        return undefined;
      case 'finish': return this.answer;
      case 'close': return this.close();
      default: throw new Broken(`what is ${verb}?`);
    }
  }

  async close() {
    if (this.lost) return;
    await this.client.end();
  }
}

class Case {
  constructor(key, ports, options) {
    Object.assign(this, { names: { key }, ports, options, connections: {} });
  }

  fill(value) {
    if (Array.isArray(value)) return value.map((item) => this.fill(item));
    if (typeof value !== 'string') return value;
    return Object.entries(this.names).reduce(
      (text, [name, its]) => text.replaceAll(`{${name}}`, its), value);
  }

  async connection(name) {
    const port = this.ports[name] ?? this.ports.plain;
    this.connections[name] ??= await Connection.open(port, this.options);
    return this.connections[name];
  }

  checkRows(step, rows) {
    if (step.keep) this.names[step.keep] = asText(rows[0][0]);
    if (!step.rows) return;
    const texts = rows.map((row) => row.map(asText).join('|'));
    if (JSON.stringify(texts) !== JSON.stringify(this.fill(step.rows))) {
      throw new Broken(JSON.stringify(texts));
    }
  }

  async until(step, connection) {
    for (const end = Date.now() + PATIENCE; ; await pause(20)) {
      const rows = await connection.query(step.rest, this.fill(step.args));
      try {
        this.checkRows(step, rows);
        return;
      } catch (error) {
        if (Date.now() > end) throw error;
      }
    }
  }

  async attempt(step) {
    const connection = await this.connection(step.connection);
    let outcome;
    try {
      if (step.verb === 'until') await this.until(step, connection);
      else this.checkRows(step, await connection.step(step, this.fill(step.args)));
    } catch (error) {
      if (error instanceof Broken) throw error;
      outcome = error.code ?? (connection.lost ? 'lost' : String(error));
      if (/^08|^ECONNRESET$/.test(outcome)) outcome = 'lost';
    }
    if (outcome !== (step.lost ? 'lost' : step.error)) throw new Broken(outcome ?? 'no error');
  }

  async run(steps) {
    try {
      for (const step of steps) {
        await this.attempt(step).catch((error) => {
          throw new Broken(`line ${step.number}: ${error.stack}`);
        });
      }
    } finally {
      await Promise.all(Object.values(this.connections).map((one) => one.close()));
    }
  }
}

async function main([file, prefix, plain, reply, request, ...options]) {
  const ports = { plain, 'lost-reply': reply, 'lost-request': request };
  let passed = 0;
  let failed = 0;
  let number = 0;
  for (const { title, steps } of readCases(file, options)) {
    number += 1;
    try {
      await new Case(`${prefix}:${number}`, ports, options).run(steps);
      passed += 1;
      console.log(`ok - ${title}`);
    } catch (error) {
      failed += 1;
      console.log(`not ok - ${title}: ${error.message}`);
    }
  }
  console.log(`${passed} passed, ${failed} failed`);
  process.exit(failed || !passed ? 1 : 0);
}

main(process.argv.slice(2));

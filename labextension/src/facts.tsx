/** Small things that several views show. */
import * as React from 'react';

import { formatAge, type Trans } from './words.js';

/** Facts in a row, none of them broken over two lines. */
export function Facts({ facts }: { facts: readonly string[] }): JSX.Element {
  return (
    <>
      {facts.map((fact, index) => (
        <React.Fragment key={index}>
          {index > 0 && ' · '}
          <span className={fact.length < 30 ? 'ab-fact' : undefined}>{fact}</span>
        </React.Fragment>
      ))}
    </>
  );
}

/** How long ago it was, given in seconds since the epoch; the time itself is its tooltip. */
export function Ago({ time, trans }: { time: number; trans: Trans }): JSX.Element {
  const date = new Date(time * 1000);
  return (
    <time className="ab-fact" dateTime={date.toISOString()} title={date.toLocaleString()}>
      {trans.__('%1 ago', formatAge(Date.now() / 1000 - time, trans))}
    </time>
  );
}

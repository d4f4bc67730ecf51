/** Small components shared by several views. */
import * as React from 'react';

import { formatAge, type Trans } from './words.js';

/** Facts separated by dots; short ones do not wrap. */
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

/** The age of a time given in seconds since the epoch, with the date and time as tooltip. */
export function Ago({ time, trans }: { time: number; trans: Trans }): JSX.Element {
  const date = new Date(time * 1000);
  return (
    <time className="ab-fact" dateTime={date.toISOString()} title={date.toLocaleString()}>
      {trans.__('%1 ago', formatAge(Date.now() / 1000 - time, trans))}
    </time>
  );
}

import type { ISignal } from '@lumino/signaling';
import * as React from 'react';

import type { Model } from './model.js';

/** Redraw when the model changes. */
export function useModel(model: Model): void {
  const [, redraw] = React.useReducer((count: number) => count + 1, 0);
  useSignal(model.changed, redraw);
}

/** Call back on each signal while the component is mounted. */
export function useSignal<T>(signal: ISignal<unknown, T>, callback: (value: T) => void): void {
  const latest = React.useRef(callback);
  latest.current = callback;
  React.useEffect(() => {
    const slot = (_: unknown, value: T): void => {
      latest.current(value);
    };
    signal.connect(slot);
    return () => {
      signal.disconnect(slot);
    };
  }, [signal]);
}

/** Fetch a value at first, when `key` changes and on demand; `problem` is the last error's message. */
export function useFetched<T>(fetch: () => Promise<T>, key: string): { value: T | undefined; problem: string; again: () => void } {
  const [state, setState] = React.useState<{ value?: T; problem: string }>({ problem: '' });
  const [turn, again] = React.useReducer((count: number) => count + 1, 0);
  React.useEffect(() => {
    let isWanted = true;
    fetch().then(
      value => {
        if (isWanted) {
          setState({ value, problem: '' });
        }
      },
      (error: unknown) => {
        if (isWanted) {
          setState(old => ({ ...old, problem: (error as Error).message }));
        }
      }
    );
    return () => {
      isWanted = false;
    };
  }, [key, turn]);
  return { value: state.value, problem: state.problem, again };
}

/** The sandbox indicator in notebook toolbars and the status bar: isolation, resource use and allowed hosts. */
import { ReactWidget } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';

import { boxedIcon, unboxedIcon } from './icons.js';
import type { Model } from './model.js';
import { formatCpu, formatMemory, formatReach, formatState, type Info } from './words.js';

/** What is known about a notebook's kernel. */
export interface Seen {
  isBoxed: boolean;
  info: Info | undefined;
}

export function see(model: Model, panel: NotebookPanel): Seen | null {
  const kernel = panel.sessionContext.session?.kernel;
  if (!kernel) {
    return null;
  }
  const info = model.find(kernel.id);
  return { isBoxed: info !== undefined || model.isBoxedSpec(kernel.name), info };
}

/** Return the parts of the one-line summary. */
export function describe(model: Model, { isBoxed, info }: Seen): string[] {
  const { trans } = model;
  if (!isBoxed) {
    return [trans.__('Not sandboxed'), trans.__('code runs with your full permissions')];
  }
  if (!info) {
    return [trans.__('Sandboxed'), model.mode === 'gateway' ? trans.__('on the gateway') : ''].filter(Boolean);
  }
  const state = info.state === 'running' ? '' : formatState(info.state, trans);
  return [
    trans.__('Sandboxed'),
    state,
    info.profile,
    formatMemory(info, trans),
    formatCpu(model.share(info), info, trans),
    formatReach(info.allowed_hosts, trans)
  ].filter(Boolean);
}

function Shown({ seen, model, isShort, onOpen }: { seen: Seen | null; model: Model; isShort: boolean; onOpen: (info: Info) => void }): JSX.Element {
  if (seen === null || (model.mode !== 'here' && !seen.isBoxed)) {
    return <></>;
  }
  const parts = describe(model, seen);
  const Icon = seen.isBoxed ? boxedIcon.react : unboxedIcon.react;
  const short = seen.info ? [parts[0], formatMemory(seen.info, model.trans)].filter(Boolean) : parts.slice(0, 1);
  const { info } = seen;
  return (
    <button
      type="button"
      className={`ab-indicator ${seen.isBoxed ? 'ab-mod-boxed' : 'ab-mod-unboxed'}`}
      title={parts.join(' · ')}
      aria-disabled={info === undefined}
      onClick={() => {
        if (info) {
          onOpen(info);
        }
      }}
    >
      <Icon tag="span" className="ab-icon" aria-hidden="true" />
      <span>{(isShort ? short : parts).join(' · ')}</span>
    </button>
  );
}

/** An indicator for one notebook, or for the current widget. */
export class Indicator extends ReactWidget {
  constructor(
    private readonly model: Model,
    private readonly getSeen: () => Seen | null,
    private readonly onOpen: (info: Info) => void,
    private readonly isShort: boolean
  ) {
    super();
    this.addClass('ab-indicator-box');
    model.changed.connect(() => {
      this.update();
    }, this);
  }

  protected override render(): JSX.Element {
    return <Shown seen={this.getSeen()} model={this.model} isShort={this.isShort} onOpen={this.onOpen} />;
  }
}

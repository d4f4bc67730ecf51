/** The view of one sandbox, with the tabs Network, Snapshots, Files and Activity. */
import { ReactWidget } from '@jupyterlab/apputils';
import * as React from 'react';

import type { Actions, Tab } from './actions.js';
import { Activity } from './activity.js';
import { Facts } from './facts.js';
import { Files } from './files.js';
import { useModel } from './hooks.js';
import type { Model } from './model.js';
import { Reach } from './reach.js';
import { Snapshots } from './snapshots.js';
import { formatCpu, formatMemory, formatSize, formatState, idOf, type Info } from './words.js';

/** Properties of each tab. */
export interface Part {
  info: Info;
  model: Model;
  actions: Actions;
}

function View({ id, last, tab, onTab, model, actions }: { id: string; last: Info; tab: Tab; onTab: (tab: Tab) => void; model: Model; actions: Actions }): JSX.Element {
  useModel(model);
  const { trans } = model;
  const info = model.find(id);
  const shown = info ?? last;
  const tabs: [Tab, string][] = [
    ['reach', trans.__('Network')],
    ['snapshots', trans.__('Snapshots')],
    ['files', trans.__('Files')],
    ['activity', trans.__('Activity')]
  ];
  const turn = (event: React.KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step !== undefined) {
      const at = tabs.findIndex(([name]) => name === tab);
      const next = tabs[(at + step + tabs.length) % tabs.length]?.[0] ?? 'reach';
      onTab(next);
      (event.currentTarget.querySelector(`[data-tab=${next}]`) as HTMLElement | null)?.focus();
    }
  };
  const Body = { reach: Reach, snapshots: Snapshots, files: Files, activity: Activity }[tab];
  const facts = [
    formatState(info ? shown.state : 'ended', trans),
    shown.profile,
    formatMemory(shown, trans),
    formatCpu(model.share(shown), shown, trans),
    shown.usage && shown.limits ? trans.__('disk %1 of %2', formatSize(shown.usage.disk), formatSize(shown.limits.disk)) : '',
    shown.end?.message ?? ''
  ].filter(Boolean);
  return (
    <div className="ab-view">
      <h1>{actions.name(shown)}</h1>
      <p role="status">
        <Facts facts={facts} />
      </p>
      <div role="tablist" aria-label={trans.__('Sandbox details')} className="ab-tabs" onKeyDown={turn}>
        {tabs.map(([name, label]) => (
          <button
            type="button"
            role="tab"
            key={name}
            data-tab={name}
            id={`ab-tab-${id}-${name}`}
            aria-selected={name === tab}
            aria-controls={`ab-body-${id}`}
            tabIndex={name === tab ? 0 : -1}
            onClick={() => {
              onTab(name);
            }}
          >
            {label}
          </button>
        ))}
      </div>
      <div role="tabpanel" id={`ab-body-${id}`} aria-labelledby={`ab-tab-${id}-${tab}`} tabIndex={0} className="ab-body">
        {info ? (
          <Body key={tab} info={info} model={model} actions={actions} />
        ) : (
          <p className="ab-note">{trans.__('This sandbox has ended. Only its snapshots and the files in a shared folder remain.')}</p>
        )}
      </div>
    </div>
  );
}

export class SandboxView extends ReactWidget {
  private _tab: Tab = 'reach';
  private readonly _key: string;

  constructor(
    private readonly model: Model,
    private readonly actions: Actions,
    private readonly last: Info
  ) {
    super();
    this._key = idOf(last);
    this.addClass('ab-view-box');
  }

  showTab(tab: Tab): void {
    this._tab = tab;
    this.update();
  }

  protected override render(): JSX.Element {
    const onTab = (tab: Tab): void => {
      this.showTab(tab);
    };
    return <View id={this._key} last={this.last} tab={this._tab} onTab={onTab} model={this.model} actions={this.actions} />;
  }
}

/// <reference types="node" />
// The types of trunkline-agent. README.md describes each name.

import type { MessageFields, Operations, Schedule, SentFields } from "./lib/operations.js";
export type * from "./lib/operations.js";

/** Any JSON. A bigint is an integer; a number is one if it is whole and safe, else a float. */
export type Json =
  | null
  | boolean
  | number
  | bigint
  | string
  | Float
  | readonly Json[]
  | { readonly [key: string]: Json | undefined };

// Signing.

/** A float whose value is a whole number, such as `1.0`. */
export class Float {
  constructor(value: number);
  readonly value: number;
  valueOf(): number;
  toJSON(): number;
}

export class MalformedJsonError extends UsageError {}

export function canonical(value: unknown): string;
export function canonicalBytes(value: unknown): Buffer;
export function decode(json: Uint8Array | string, options?: { exact?: boolean }): any;

/** A job event, as it is sent. Other fields are kept and signed. */
export interface EventFields {
  data: Record<string, unknown>;
  [field: string]: unknown;
}

export function signedBytes(event: EventFields): Buffer;
export function signEvent<T extends EventFields>(event: T, secret: string): T & { data: { hmac_sig: string } };
export function signEventText(json: string, secret: string): string;
export function verifyEvent(event: EventFields, secret: string): boolean;
export function signedMessageBytes(message: Record<string, unknown>): Buffer;
export function signMessage<T extends Record<string, unknown>>(message: T, secret: string): T & { hmac_sig: string };
export function contentId(...parts: (string | Uint8Array)[]): string;
export function jobUser(jobId: string, secret: string): string;
export function mqttPassword(secret: string, user: string): string;

// Credentials.

export class HubAccess {
  constructor(url: string, token: string);
  readonly url: string;
  /** Not shown by `console.log` and `JSON.stringify`. */
  readonly token: string;
}

export class MqttAccess {
  constructor(fields?: { host?: string; port?: number; tls?: boolean; prefix?: string; secret?: string | null });
  readonly host: string;
  readonly port: number;
  readonly tls: boolean;
  readonly prefix: string;
  readonly secret: string | null;
}

export class McpAccess {
  constructor(fields: { url: string; private_key?: string | null });
  readonly url: string;
  readonly privateKey: string | null;
}

export class Credentials {
  constructor(parts?: {
    name?: string | null;
    hub?: HubAccess | { url: string; token: string } | null;
    mqtt?: MqttAccess | ConstructorParameters<typeof MqttAccess>[0] | null;
    mcp?: McpAccess | ConstructorParameters<typeof McpAccess>[0] | null;
    caCerts?: string | null;
  });
  static load(path: string): Credentials;
  static fromEnvironment(environment?: Record<string, string | undefined>): Credentials;
  readonly name: string | null;
  readonly hub: HubAccess | null;
  readonly mqtt: MqttAccess | null;
  readonly mcp: McpAccess | null;
  readonly caCerts: string | null;
  section(door: "hub"): HubAccess;
  section(door: "mqtt"): MqttAccess;
  section(door: "mcp"): McpAccess;
}

// The agent.

export type Priority = "low" | "normal" | "high";

export interface Signalled {
  signal?: AbortSignal;
}

export interface SendOptions extends Signalled, SentFields {
  /**
   * The idempotency key. Without it, each call is a message of its own; within the handling of a message, the same
   * content of a repeated handling is the same message.
   */
  key?: string;
}

export interface Sent {
  /** Null: an earlier handling of the same message has sent another content at this place, and this one was not. */
  messageId: string | null;
  /** False: the message is delayed. */
  delivered: boolean;
  verdict: "accepted" | "duplicate" | null;
}

export interface Published {
  /** Null: as in `Sent`. */
  messageId: string | null;
  topic: string;
  recipients: number;
  verdict: "accepted" | "duplicate" | null;
}

export interface BlobInfo {
  digest: string;
  bytes: number;
  contentType: string;
}

export interface StoredBlob extends BlobInfo {
  keepUntil: Date;
}

export interface ScheduleOptions extends Signalled {
  /** Minute, hour, day of month, month and day of week, in UTC. */
  cron?: string;
  everyS?: number;
  missed?: "skip" | "latest" | "all";
  priority?: Priority;
  expiresInS?: number;
  key?: string;
}

export interface ReceiveOptions extends Signalled {
  /** The duration of a lease, 30 s by default. It is extended until the message is settled. */
  leaseS?: number;
  /** How long a handling may take, an hour by default; Infinity: without an end. Then the message is given back. */
  longestS?: number;
  /** The wait or the loop ends when no message came for so long. Without it, it waits without a limit. */
  waitS?: number;
  /** How long the gateway may be away; that of the agent by default. */
  patienceS?: number;
}

export interface MessagesOptions extends ReceiveOptions {
  /** How many messages to lease at once; 1 by default. */
  limit?: number;
}

export type MessageState = "open" | "handling" | "acknowledged" | "given back" | "lost" | "not leased";

export interface Message extends MessageFields {
  readonly id: string;
  readonly timestamp: Date;
  readonly sender: string;
  readonly recipient: string;
  readonly type: string;
  readonly payload: any;
  readonly topic: string | null;
  readonly replayOf: string | null;
  /** How often the message was handed out, from 1. */
  readonly attempt: number;
  readonly blobInfo: BlobInfo | null;
  readonly leaseId: string | null;
  readonly state: MessageState;
  /** Aborts when the lease is lost, or the handling has taken longer than `longestS`. */
  readonly signal: AbortSignal;
  handle<T>(work: (message: Message) => T | Promise<T>): Promise<T>;
  ack(): Promise<void>;
  nack(reason?: string): Promise<void>;
  extend(seconds?: number): Promise<void>;
  reply(payload?: unknown, options?: SendOptions & { type?: string }): Promise<Sent>;
  blob(options?: Signalled): Promise<Buffer>;
}

export const Message: { readonly prototype: Message };

export interface PatienceOptions {
  /** How long a failing request is repeated, 30 s by default. */
  patienceS?: number;
}

export class Agent extends Operations implements AsyncDisposable {
  constructor(name: string | null, credentials: Credentials, options?: PatienceOptions);
  readonly name: string | null;
  messages(options?: MessagesOptions): AsyncGenerator<Message, void, void>;
  receive(options?: ReceiveOptions): Promise<Message | null>;
  send(recipient: string, type: string, payload?: unknown, options?: SendOptions): Promise<Sent>;
  ask(
    recipient: string,
    type: string,
    payload?: unknown,
    options?: SendOptions & { timeoutS?: number },
  ): Promise<Message>;
  reply(message: Message, payload?: unknown, options?: SendOptions & { type?: string }): Promise<Sent>;
  publish(topic: string, type: string, payload?: unknown, options?: SendOptions): Promise<Published>;
  schedule(
    name: string,
    recipient: string,
    type: string,
    payload: unknown,
    options: ScheduleOptions,
  ): Promise<Schedule>;
  status(state: string, text?: string, options?: Signalled): Promise<Sent>;
  upload(content: Uint8Array | string, options?: Signalled & { contentType?: string }): Promise<StoredBlob>;
  blob(message: Message, options?: Signalled): Promise<Buffer>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

// Jobs.

export interface LogPosition {
  partition: number;
  offset: number;
}

export interface Receipt {
  readonly ceId: string;
  readonly seq: number | null;
  /** Null: the log has the event, and it is not settled yet. That counts as delivered. */
  readonly verdict: "accepted" | "duplicate" | "rejected" | null;
  readonly reason: string | null;
  readonly position: LogPosition | null;
}

export interface MqttBroker {
  host?: string;
  port?: number;
  tls?: boolean;
  topicPrefix?: string;
  /** Without it, the job's own account at the backbone's broker. */
  username?: string;
  password?: string;
  caCerts?: string;
  certfile?: string;
  keyfile?: string;
  /** Attempts to connect, 3 by default. */
  attempts?: number;
  connectS?: number;
  /** How long to wait for a receipt, 10 s by default. */
  receiptS?: number;
}

export interface JobOptions extends PatienceOptions {
  hub?: Credentials | HubAccess;
  mqtt?: MqttBroker;
  stateDir?: string;
  /** The largest event, `limits.payload_bytes` of the backbone. */
  payloadBytes?: number;
  lockTimeoutS?: number;
}

export type JobEventName = "started" | "progress" | "permission_required" | "completed" | "error";

export class Job implements AsyncDisposable {
  constructor(jobId: string, secret: string, options: JobOptions);
  static fromEnvironment(options?: JobOptions, environment?: Record<string, string | undefined>): Job;
  readonly id: string;
  started(detail?: string, data?: object, options?: Signalled): Promise<Receipt>;
  progress(detail?: string, data?: object, options?: Signalled): Promise<Receipt>;
  permissionRequired(detail: string, data?: object, options?: Signalled): Promise<Receipt>;
  completed(detail?: string, data?: object, options?: Signalled): Promise<Receipt>;
  error(detail?: string, data?: object, options?: Signalled): Promise<Receipt>;
  publish(event: JobEventName, detail: string, data?: object, options?: Signalled): Promise<Receipt>;
  run<T>(work: (job: Job) => T | Promise<T>): Promise<T>;
  resend(options?: Signalled): Promise<number>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

// Delegating.

export interface SubmittedJob {
  readonly jobId: string;
  readonly position: LogPosition;
  /** Not shown by `console.log` and `JSON.stringify`. */
  readonly secret: string;
  environment(): { TRUNKLINE_JOB_ID: string; TRUNKLINE_JOB_SECRET: string };
}

export const SubmittedJob: { readonly prototype: SubmittedJob };

export interface WatchedEvent {
  jobId: string;
  event: JobEventName | "cancelled" | null;
  seq: number | null;
  detail: string;
  data: Record<string, any>;
  timestamp: string | null;
  status: "pending" | "running" | "completed" | "error" | "cancelled";
  late: boolean;
  position: LogPosition | null;
  loggedAt: string;
  /** The job had ended before the watch began. */
  fromSnapshot: boolean;
  isEnd: boolean;
}

export interface JobRequest extends Signalled {
  description: string;
  session?: string;
  broker?: Omit<MqttBroker, "topicPrefix" | "attempts" | "connectS" | "receiptS">;
  notify?: ("end" | "permission")[];
  key?: string;
}

export class Delegator implements AsyncDisposable {
  constructor(credentials: Credentials, options?: PatienceOptions);
  submit(job: JobRequest): Promise<SubmittedJob>;
  cancel(jobId: string, options?: Signalled & { reason?: string; key?: string }): Promise<string>;
  show(jobId: string, options?: Signalled): Promise<Record<string, any>>;
  watch(
    jobId: string,
    options?: Signalled & { idleTimeoutS?: number; totalTimeoutS?: number },
  ): AsyncGenerator<WatchedEvent, void, void>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

// Errors.

export interface ErrorOptions {
  reason?: string;
  advice?: string;
  cause?: unknown;
}

export class TrunklineError extends Error {
  constructor(message: string, more?: ErrorOptions);
  /** A stable code: of the backbone's verdicts, or of this library. */
  reason: string;
  /** The next step. */
  advice: string;
  exitCode: number;
}
export class UsageError extends TrunklineError {}
export class NotFound extends TrunklineError {}
export class Refused extends TrunklineError {}
export class EventRejected extends Refused {
  constructor(receipt: Receipt);
  readonly receipt: Receipt;
}
export class MessageRejected extends Refused {}
export class RateLimited extends Refused {
  constructor(message: string, more?: ErrorOptions & { retryAfterS?: number | null });
  readonly retryAfterS: number | null;
}
export class LeaseLost extends Refused {}
export class BackboneUnreachable extends TrunklineError {}
export class NoReply extends BackboneUnreachable {
  constructor(message: string, more?: ErrorOptions & { messageId?: string | null });
  readonly messageId: string | null;
}
export class ReceiptMissing extends BackboneUnreachable {}
export class OutboxBusy extends TrunklineError {}

export declare const errors: {
  TrunklineError: typeof TrunklineError;
  UsageError: typeof UsageError;
  NotFound: typeof NotFound;
  Refused: typeof Refused;
  EventRejected: typeof EventRejected;
  MessageRejected: typeof MessageRejected;
  RateLimited: typeof RateLimited;
  LeaseLost: typeof LeaseLost;
  BackboneUnreachable: typeof BackboneUnreachable;
  NoReply: typeof NoReply;
  ReceiptMissing: typeof ReceiptMissing;
  OutboxBusy: typeof OutboxBusy;
};

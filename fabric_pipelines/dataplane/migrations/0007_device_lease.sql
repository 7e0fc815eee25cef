-- One card at a time holds a shard. The lease and what is loaded under it are one row, so that no statement can say that a
-- generation is served by someone who no longer holds the shard.
create table fabric.device_lease (
    name        text primary key,
    holder      text not null,
    token       bigint not null,
    expires     timestamptz not null,
    generation  bigint,
    loaded_at   timestamptz,
    foreign key (name, generation) references fabric.shard_generation (name, generation)
);
comment on column fabric.device_lease.holder is 'machine and card';
comment on column fabric.device_lease.generation is 'what was loaded and checked under this token; null until then';
